// Shows the theme that was chosen on an earlier visit. It is a classic script in the head, because a module would
// run only after the page was painted in the other theme.
(() => {
  try {
    const theme = JSON.parse(localStorage.getItem("penstock.settings") ?? "{}").theme;
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Where the browser keeps nothing for this page, the system's theme is shown.
  }
})();
