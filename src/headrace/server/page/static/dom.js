// Small tools to build the page with. HTML enters it in one place only, from the server's own renderer.

export const $ = (selector, root = document) => root.querySelector(selector);

/** An element with properties, listeners ("onclick") and children. */
export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** The same for SVG: attributes only. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const policy = window.trustedTypes?.createPolicy("headrace", { createHTML: (html) => html });

/** Elements made of HTML from /page/render, which has cleaned it. */
export function fromRenderer(html) {
  const template = document.createElement("template");
  template.innerHTML = policy ? policy.createHTML(html) : html;
  return [...template.content.childNodes];
}

/** Tell a screen reader. */
export function say(text) {
  $("#say").textContent = text;
}
