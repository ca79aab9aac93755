// The timeline: dragging over the lanes zooms to that interval.
export function brush() {
  const lanes = document.querySelector("[data-timeline] .lanes");
  if (!lanes) return;
  let from = null, box = null;
  const area = () => lanes.querySelector(".lane svg").getBoundingClientRect();
  const share = (event) => Math.min(Math.max((event.clientX - area().left) / area().width, 0), 1);
  lanes.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.clientX >= area().left) from = event; });
  addEventListener("pointermove", (event) => {
    if (!from || Math.abs(event.clientX - from.clientX) < 5) return;
    box ??= lanes.appendChild(Object.assign(document.createElement("div"), { className: "brush" }));
    const left = Math.min(event.clientX, from.clientX) - lanes.getBoundingClientRect().left;
    box.style.left = `${left}px`;
    box.style.width = `${Math.abs(event.clientX - from.clientX)}px`;
  });
  addEventListener("pointerup", (event) => {
    if (from && box) {
      const { start, stop } = lanes.closest("[data-timeline]").dataset;
      const places = [share(from), share(event)].sort((one, other) => one - other).map((each) => +start + each * (stop - start));
      const target = new URL(location.href);
      target.searchParams.set("start", places[0]);
      target.searchParams.set("stop", places[1]);
      if (places[1] > places[0]) location.href = target.href;
    }
    from = box = (box?.remove(), null);
  });
  lanes.addEventListener("click", (event) => { if (box) event.preventDefault(); }, true);
  lanes.addEventListener("dragstart", (event) => event.preventDefault());
}
