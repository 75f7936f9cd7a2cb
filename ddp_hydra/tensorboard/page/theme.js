// Be dark or light as TensorBoard is; by itself, as the browser asks for.

export function followTheme() {
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let above = null;
  try {
    above = window.parent !== window ? window.parent.document.body : null;
  } catch {
    above = null; // a frame of another origin
  }
  const apply = () => {
    const isDark = above ? above.classList.contains("dark-mode") : preferred.matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
  };
  apply();
  preferred.addEventListener("change", apply);
  if (above) new MutationObserver(apply).observe(above, { attributes: true, attributeFilter: ["class"] });
}
