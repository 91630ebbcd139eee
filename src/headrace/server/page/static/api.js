// The server's API: calls, streams, and what went wrong in a form that can be shown.
import { key } from "/page/storage.js";

/** `kind`: key, busy, down, unreachable, long, refused or failed. `retry`: seconds after which it may work. */
export class ApiError extends Error {
  constructor(kind, message, retry = null) {
    super(message);
    this.kind = kind;
    this.retry = retry;
  }
}

const KINDS = { 401: "key", 403: "key", 429: "busy", 503: "down" };
const TOO_LONG = "context_length_exceeded";

async function send(path, { body, form, signal } = {}) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const method = body === undefined && !form ? "GET" : "POST";
    response = await fetch(path, { method, headers, signal, body: form ?? (body && JSON.stringify(body)), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("unreachable", "");
  }
  if (!response.ok && path !== "/health") throw await asError(response);
  return response;
}

async function asError(response) {
  const text = await response.text().catch(() => "");
  let [message, code] = [`${response.status} ${response.statusText}`, ""];
  try {
    ({ message, code } = JSON.parse(text).error);
  } catch { /* no JSON: the status says it */ }
  const retry = Number(response.headers.get("Retry-After")) || null;
  const kind = code === TOO_LONG ? "long" : (KINDS[response.status] ?? (response.status < 500 ? "refused" : "failed"));
  return new ApiError(kind, message, retry);
}

export const getText = async (path, options) => (await send(path, options)).text();
export const getJson = async (path, options) => (await send(path, options)).json();
/** The JSON that answers a multipart form. */
export const getForm = async (path, form, signal) => (await send(path, { form, signal })).json();

/** The events of a streamed answer. Throws ApiError, also for one that comes within the stream. */
export async function* stream(path, body, signal) {
  const response = await send(path, { body, signal }).catch((error) => {
    // The server refuses more tokens than the context has room for. The setting is an upper bound: ask without it.
    const { max_completion_tokens: most, ...rest } = body;
    if (error.kind !== "long" || most === undefined) throw error;
    return send(path, { body: rest, signal });
  });
  for await (const data of events(response.body.getReader())) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code === "engine_unavailable" ? "down" : "failed", event.error.message, 2);
    yield event;
  }
  throw new ApiError("unreachable", "");
}

async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("unreachable", "");
  } finally {
    reader.cancel().catch(() => {});
  }
}
