// The present page in view in the sidebar; wide tables and figures that the keyboard can scroll; summaries of what a search finds.
addEventListener("DOMContentLoaded", () => {
  const box = document.querySelector(".sidebar-scroll"), here = document.querySelector(".sidebar-tree .current-page");
  if (box && here) {
    const at = here.getBoundingClientRect(), within = box.getBoundingClientRect();
    if (at.top < within.top || at.bottom > within.bottom) 
      box.scrollTo({top: box.scrollTop + at.top - within.top - within.height / 3, behavior: "instant"});
  }
  // a figure with panels side by side is not shrunk until nobody can read it: on a phone it scrolls
  const broad = () => document.querySelectorAll("article figure > img, article figure > a > img").forEach(i =>
    i.closest("figure").classList.toggle("broad", innerWidth < 700 && i.naturalWidth > 1.6 * i.naturalHeight));
  broad();
  addEventListener("load", () => { broad(); look(); });
  addEventListener("resize", broad);
  const look = () => document.querySelectorAll(".table-wrapper, div.math, .cell_output > div, article pre, article figure").forEach(w => {
    const wide = w.scrollWidth > w.clientWidth + 1;
    w.classList.toggle("wide", wide);
    if (wide) w.tabIndex = 0;
    else w.removeAttribute("tabindex");
  });
  look();
  addEventListener("resize", look);
  const results = document.getElementById("search-results");
  if (!results || typeof SUMMARIES === "undefined") return;
  const root = new URL(document.documentElement.dataset.content_root, location.href).pathname;
  new MutationObserver(() => results.querySelectorAll("li > a:not(.told)").forEach(a => {
    a.classList.add("told");
    const text = SUMMARIES[new URL(a.href).pathname.slice(root.length).replace(/\.html$/, "")];
    if (!text) return;
    a.parentElement.append(Object.assign(document.createElement("p"), {className: "context", textContent: text}));
  })).observe(results, {childList: true, subtree: true});
});
