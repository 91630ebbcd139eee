// Line icons, 24 by 24.
import { svg } from "/page/dom.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  chat: "M4 5h16v11H9l-5 4z",
  pulse: "M3 12h4l3-8 4 16 3-8h4",
  theme: "M12 3a9 9 0 1 0 9 9 7 7 0 0 1-9-9z",
  language: "M3 12h18M12 3a14 14 0 0 1 0 18M12 3a14 14 0 0 0 0 18M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  key: "M14 10l7-7M17 6l3 3M8 21a5 5 0 1 0 0-10 5 5 0 0 0 0 10zM11.5 12.500L14 10",
  menu: "M4 7h16M4 12h16M4 17h16",
  help: "M9 9a3 3 0 1 1 4.5 2.600c-1 .6-1.5 1.2-1.5 2.400M12 17.500v.1M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  down: "M12 5v14M6 13l6 6 6-6",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  edit: "M4 20l1-5L16 4l4 4L9 19z",
  bin: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  tokens: "M4 6h5v5H4zM15 6h5v5h-5zM4 15h8v4H4zM16 15h4v4h-4z",
  more: "M5 12h.1M12 12h.1M19 12h.1",
  load: "M12 15V4M7 9l5-5 5 5M5 20h14",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  goOn: "M5 6l7 6-7 6M13 6l7 6-7 6",
  thought: "M9 18h6M10 21h4M12 3a6 6 0 0 0-3.500 10.900c.6.500 1 1.200 1 2.100h5c0-.9.400-1.600 1-2.100A6 6 0 0 0 12 3z",
  clip: "M20 11l-8.500 8.500a5 5 0 0 1-7-7L13 4a3.300 3.300 0 0 1 4.700 4.700L9.500 17a1.700 1.700 0 0 1-2.400-2.400L14.500 7.500",
  microphone: "M12 3a3 3 0 0 0-3 3v5a3 3 0 0 0 6 0V6a3 3 0 0 0-3-3zM5 11a7 7 0 0 0 14 0M12 18v3",
  wave: "M4 10v4M8 7v10M12 4v16M16 7v10M20 10v4",
  close: "M6 6l12 12M18 6L6 18",
  warn: "M12 4l9 16H3zM12 10v5M12 17.500v.1",
};

export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 24 24", width: 18, height: 18, fill: "none", stroke: "currentColor", "stroke-width": 1.7,
      "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true", class: "icon-" + name },
    svg("path", { d: PATHS[name] }),
  );
}
