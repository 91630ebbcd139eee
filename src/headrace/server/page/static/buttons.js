// Buttons: an icon alone, or an icon with its word.
import { h, say } from "/page/dom.js";
import { icon } from "/page/icons.js";
import { t } from "/page/texts.js";

/** An icon, named by a tooltip. `values` fill in the name. */
export function button(name, label, onclick, more = {}, values = {}) {
  const named = t(label, values);
  return h("button", { type: "button", className: "icon", title: named, "aria-label": named, onclick, ...more }, icon(name));
}

/** An icon and a word; the tooltip says it at length. */
export function worded(name, word, label, onclick, more = {}) {
  return h("button", { type: "button", className: "worded", title: t(label), onclick, ...more }, icon(name), h("span", {}, t(word)));
}

/** A button that copies a text; `words` gives it a word. */
export function copier(text, words = false) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      return; // the browser forbids it
    }
    one.firstChild.replaceWith(icon("check"));
    say(t("copied"));
    setTimeout(() => one.firstChild.replaceWith(icon("copy")), 1500);
  };
  const one = words ? worded("copy", "copy", "copy", copy) : button("copy", "copy", copy);
  return one;
}
