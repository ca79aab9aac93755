// Live pages: parts of the page are fetched again when the run writes something, or every few seconds while they ask for it.
const LEAST = 2000; // milliseconds between two updates

async function swap() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
    if (!other || part.contains(document.activeElement)) continue;
    const ticked = new Set([...part.querySelectorAll("input:checked")].map((each) => each.value));
    for (const each of other.querySelectorAll("input[type=checkbox]")) each.checked = ticked.has(each.value);
    part.replaceWith(document.adoptNode(other));
  }
}

export function watch(onChange) {
  let waiting = false, last = 0;
  const update = () => {
    if (waiting || document.hidden) return;
    waiting = true;
    setTimeout(() => { waiting = false; last = Date.now(); swap().then(onChange); }, Math.max(0, LEAST - (Date.now() - last)));
  };
  if (document.body.dataset.live) {
    const stream = new EventSource(document.body.dataset.live);
    stream.onmessage = update;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
  }
  const poll = () => {
    const asked = [...document.querySelectorAll("[data-poll]")].map((each) => Number(each.dataset.poll));
    const seconds = asked.length ? Math.min(...asked) : 0;
    if (!seconds) return;
    setTimeout(() => (document.hidden ? Promise.resolve() : swap()).catch(() => {}).then(poll), 1000 * seconds);
  };
  poll();
}
