// Keys: / searches, j and k move through rows, Enter opens one, [ and ] turn pages, t changes the theme.
export function toggleTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("antiphon-theme", document.documentElement.dataset.theme);
}

function move(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const now = rows.indexOf(document.activeElement);
  rows[Math.min(Math.max(now + by, 0), rows.length - 1)].focus();
}

export function listenToKeys(onTheme) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const turn = { "[": "prev", "]": "next" }[event.key];
    if (event.key === "/") {
      event.preventDefault();
      document.querySelector("[data-search]")?.focus();
    } else if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
    else if (event.key === "t") { toggleTheme(); onTheme(); }
    else if (turn) document.querySelector(`a[rel=${turn}]`)?.click();
  });
}
