// The sampling panel. A field left empty is the model's own setting.
import { $, h } from "/page/dom.js";
import { button } from "/page/buttons.js";
import { DEFAULTS, saveSettings, settings } from "/page/storage.js";
import { t } from "/page/texts.js";

// name, least, most, step, where the slider stands while nothing is set
const NUMBERS = [
  ["temperature", 0, 2, 0.05, 0.7], ["top_p", 0.05, 1, 0.05, 1], ["top_k", 0, 200, 1, 0], ["min_p", 0, 0.5, 0.01, 0],
  ["repetition_penalty", 0.8, 2, 0.05, 1], ["max_tokens", 1, 4096, 1, 1024],
];

export function drawPanel(close) {
  const panel = $("#panel");
  const reset = h("button", { type: "button", className: "quiet", onclick: () => { Object.assign(settings, DEFAULTS); saveSettings(); drawPanel(close); } }, t("reset"));
  panel.replaceChildren(
    h("div", { className: "head" }, h("h2", {}, t("settings")), button("close", "close", close)),
    text("system", t("system"), t("systemHint"), 4),
    ...NUMBERS.map((row) => numeric(...row)),
    seed(),
    text("stop", t("stopAt"), t("stopAtHint"), 2),
    check("tokens", t("askTokens"), t("askTokensHint")),
    reset,
  );
}

function set(name, value) {
  settings[name] = value;
  saveSettings();
}

function numeric(name, min, max, step, usual) {
  const field = h("input", { type: "number", id: `set-${name}`, min, max: name === "max_tokens" || name === "top_k" ? null : max, step, value: settings[name] ?? "", placeholder: t("own"), inputMode: "decimal" });
  const slider = h("input", { type: "range", min, max, step, value: settings[name] ?? usual, "aria-label": t(name) });
  const paint = () => {
    slider.classList.toggle("unset", settings[name] === null);
    slider.style.setProperty("--at", (slider.value - min) / (max - min));
  };
  field.addEventListener("input", () => {
    const good = field.value === "" || field.validity.valid || field.validity.stepMismatch;
    field.setAttribute("aria-invalid", String(!good));
    if (!good) return;
    set(name, field.value === "" ? null : Number(field.value));
    slider.value = settings[name] ?? usual;
    paint();
  });
  slider.addEventListener("input", () => {
    field.value = slider.value;
    set(name, Number(slider.value));
    paint();
  });
  paint();
  return h("div", { className: "field" }, h("label", { htmlFor: `set-${name}` }, t(name)), field, slider, h("p", {}, t(`${name}Hint`)));
}

function seed() {
  const field = h("input", { type: "text", id: "set-seed", inputMode: "numeric", pattern: "[0-9]{1,15}", value: settings.seed ?? "", placeholder: t("none") });
  field.addEventListener("input", () => {
    const good = field.validity.valid;
    field.setAttribute("aria-invalid", String(!good));
    if (good) set("seed", field.value === "" ? null : Number(field.value));
  });
  return h("div", { className: "field" }, h("label", { htmlFor: "set-seed" }, t("seed")), field, h("p", {}, t("seedHint")));
}

function text(name, label, hint, rows) {
  const field = h("textarea", { id: `set-${name}`, rows, value: settings[name], placeholder: hint });
  field.addEventListener("input", () => set(name, field.value));
  return h("div", { className: "field" }, h("label", { htmlFor: `set-${name}` }, label), field);
}

function check(name, label, hint) {
  const box = h("input", { type: "checkbox", id: `set-${name}`, checked: settings[name], onchange: () => set(name, box.checked) });
  return h("div", { className: "field" }, h("label", { className: "check" }, box, label), h("p", {}, hint));
}
