// What the browser keeps: conversations and settings in localStorage, the key for the session unless the user wants it kept.

const NAME = "headrace";
const ITEM = "conversation."; // each has an item of its own, so that two tabs do not write over each other

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
  stop: "", tokens: true, exit_threshold: null, cascade_threshold: null,
};

export const settings = { ...DEFAULTS, ...read("settings", {}) };
export const saveSettings = () => write("settings", settings);

export const look = { theme: "auto", language: null, panel: null, ...read("look", {}) };
export const saveLook = () => write("look", look);

/** A conversation as it was kept, or null. An answer that was under way when the page went has ended there. */
export function loadConversation(id) {
  const one = read(ITEM + id, null);
  if (!one || one.id !== id || !Array.isArray(one.messages)) return null;
  for (const message of one.messages) if (message.running) Object.assign(message, { running: false, cut: true });
  return one;
}

/** All that are kept, the newest first. Earlier they were kept in one item. */
export function loadConversations() {
  for (const one of read("conversations", [])) if (one?.id && Array.isArray(one.messages)) saveConversation(one);
  localStorage.removeItem(`${NAME}.conversations`);
  const begin = `${NAME}.${ITEM}`;
  const found = Object.keys(localStorage).filter((name) => name.startsWith(begin)).map((name) => loadConversation(name.slice(begin.length)));
  return found.filter((one) => one).sort((a, b) => b.made - a.made);
}

/** Tokens with their alternatives are large and stay in memory. */
export function saveConversation(one) {
  const light = ({ tokens, ...rest }) => rest;
  const kept = (message) => (message.versions ? { ...light(message), versions: message.versions.map(light) } : light(message));
  return write(ITEM + one.id, { ...one, messages: one.messages.map(kept) });
}

/** The dashboard's history of this tab, which a reload must not lose. */
export function keepHistory(points) {
  try {
    sessionStorage.setItem(`${NAME}.history`, JSON.stringify(points));
  } catch { /* full or forbidden: it begins anew */ }
}

export function keptHistory() {
  try {
    const points = JSON.parse(sessionStorage.getItem(`${NAME}.history`));
    return Array.isArray(points) ? points.filter((one) => Number.isFinite(one?.at)) : [];
  } catch {
    return [];
  }
}

export function forgetConversation(one) {
  localStorage.removeItem(`${NAME}.${ITEM}${one.id}`);
}

/** Calls back with the id of a conversation that another tab has changed. */
export function onOtherTab(changed) {
  const begin = `${NAME}.${ITEM}`;
  addEventListener("storage", (event) => event.key?.startsWith(begin) && changed(event.key.slice(begin.length)));
}

export function key() {
  return sessionStorage.getItem(`${NAME}.key`) ?? localStorage.getItem(`${NAME}.key`) ?? "";
}

export function setKey(value, keep) {
  for (const store of [sessionStorage, localStorage]) store.removeItem(`${NAME}.key`);
  if (value) (keep ? localStorage : sessionStorage).setItem(`${NAME}.key`, value);
}
