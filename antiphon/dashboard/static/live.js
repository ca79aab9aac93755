// Live pages: parts of the page are fetched again when the run writes something, or every few seconds while they ask for it.
const LEAST = 2000; // milliseconds between two updates

// Change one element into another in place, so that animations go on and transitions begin at the old values.
function morph(part, other) {
  for (const { name } of [...part.attributes]) if (!other.hasAttribute(name)) part.removeAttribute(name);
  for (const { name, value } of [...other.attributes]) if (part.getAttribute(name) !== value) part.setAttribute(name, value);
  const children = [...part.childNodes];
  [...other.childNodes].forEach((fresh, place) => {
    const old = children[place];
    if (!old) part.append(document.adoptNode(fresh));
    else if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) old.replaceWith(document.adoptNode(fresh));
    else if (old.nodeType === Node.ELEMENT_NODE) morph(old, fresh);
    else if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
  });
  for (const old of children.slice(other.childNodes.length)) old.remove();
}

async function swap() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
    if (!other || part.contains(document.activeElement)) continue;
    for (const each of other.querySelectorAll("[data-needs-script]")) each.hidden = false;
    const ticked = new Set([...part.querySelectorAll("input:checked")].map((each) => each.value));
    for (const each of other.querySelectorAll("input[type=checkbox]")) each.checked = ticked.has(each.value);
    if ("morph" in part.dataset) morph(part, other);
    else part.replaceWith(document.adoptNode(other));
  }
}

export function watch(onChange) {
  let waiting = false, last = 0;
  const update = () => {
    if (waiting || document.hidden) return;
    waiting = true;
    setTimeout(() => { waiting = false; last = Date.now(); swap().then(onChange, () => {}); }, Math.max(0, LEAST - (Date.now() - last)));
  };
  if (document.body.dataset.live) {
    const stream = new EventSource(document.body.dataset.live);
    const isNow = "now" in document.body.dataset; // other pages do not show what live.json says
    stream.onmessage = (event) => { if (isNow || JSON.parse(event.data).changed.some((name) => name !== "live.json")) update(); };
    let lost = false; // something may have been missed while the connection was
    stream.onerror = () => { lost = true; };
    stream.onopen = () => { if (lost) update(); lost = false; };
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
