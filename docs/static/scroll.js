// Marks tables, code and pictures that are wider than their place; site.css writes "scroll →" above them.
const mark = () => {
  for (const part of document.querySelectorAll(".bd-article table, .bd-article pre, .bd-article .picture")) {
    part.classList.toggle("too-wide", part.scrollWidth > part.clientWidth + 1);
  }
};
addEventListener("load", mark);
addEventListener("resize", mark);
