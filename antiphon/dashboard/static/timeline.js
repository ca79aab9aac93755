// The timeline: dragging over the lanes zooms to that interval. A live page replaces its lanes, so they are looked up each time.
export function brush() {
  let from = null, box = null, dragged = false;
  const lanes = () => document.querySelector("[data-timeline] .lanes");
  const area = () => lanes().querySelector(".lane svg").getBoundingClientRect();
  const share = (event) => Math.min(Math.max((event.clientX - area().left) / area().width, 0), 1);
  addEventListener("pointerdown", (event) => {
    dragged = false;
    if (event.button === 0 && lanes()?.contains(event.target) && event.clientX >= area().left) from = event;
  });
  addEventListener("pointermove", (event) => {
    if (!from || Math.abs(event.clientX - from.clientX) < 5) return;
    if (!box?.isConnected) box = lanes().appendChild(Object.assign(document.createElement("div"), { className: "brush" }));
    const left = Math.min(event.clientX, from.clientX) - lanes().getBoundingClientRect().left;
    box.style.left = `${left}px`;
    box.style.width = `${Math.abs(event.clientX - from.clientX)}px`;
  });
  addEventListener("pointerup", (event) => {
    if (from && box) {
      dragged = true;
      const { start, stop } = lanes().closest("[data-timeline]").dataset;
      const places = [share(from), share(event)].sort((one, other) => one - other).map((each) => +start + each * (stop - start));
      const target = new URL(location.href);
      target.searchParams.set("start", places[0]);
      target.searchParams.set("stop", places[1]);
      if (places[1] > places[0]) location.href = target.href;
    }
    from = box = (box?.remove(), null);
  });
  addEventListener("click", (event) => { if (dragged) event.preventDefault(); dragged = false; }, true);
  addEventListener("dragstart", (event) => { if (lanes()?.contains(event.target)) event.preventDefault(); });
}
