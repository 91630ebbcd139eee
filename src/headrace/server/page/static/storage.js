// What the browser keeps: conversations and settings in localStorage, the key for the session unless the user wants it kept.

const NAME = "headrace";

function read(part, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`${NAME}.${part}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Whether it could be kept: the browser may be full, or forbid it. */
function write(part, value) {
  try {
    localStorage.setItem(`${NAME}.${part}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const DEFAULTS = {
  system: "", temperature: null, top_p: null, top_k: null, min_p: null, repetition_penalty: null, max_tokens: 1024, seed: null,
  stop: "", tokens: false,
};

export const settings = { ...DEFAULTS, ...read("settings", {}) };
export const saveSettings = () => write("settings", settings);

export const look = { theme: "auto", language: null, panel: false, ...read("look", {}) };
export const saveLook = () => write("look", look);

export const loadConversations = () => read("conversations", []).filter((one) => one && Array.isArray(one.messages));

/** Tokens with their alternatives are large and stay in memory. */
export function saveConversations(list) {
  const slim = list.map((one) => ({ ...one, messages: one.messages.map(({ tokens, ...rest }) => rest) }));
  return write("conversations", slim);
}

export function key() {
  return sessionStorage.getItem(`${NAME}.key`) ?? localStorage.getItem(`${NAME}.key`) ?? "";
}

export function setKey(value, keep) {
  for (const store of [sessionStorage, localStorage]) store.removeItem(`${NAME}.key`);
  if (value) (keep ? localStorage : sessionStorage).setItem(`${NAME}.key`, value);
}
