// Buttons that are an icon.
import { h, say } from "/page/dom.js";
import { icon } from "/page/icons.js";
import { t } from "/page/texts.js";

export function button(name, label, onclick, more = {}) {
  return h("button", { type: "button", className: "icon", title: t(label), "aria-label": t(label), onclick, ...more }, icon(name));
}

export function copier(text) {
  const one = button("copy", "copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      return; // the browser forbids it
    }
    one.replaceChildren(icon("check"));
    say(t("copied"));
    setTimeout(() => one.replaceChildren(icon("copy")), 1500);
  });
  return one;
}
