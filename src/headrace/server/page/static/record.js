// Speech to text in the composer, by a served speech model: a sound file, or a recording of the microphone.
import { getForm } from "/page/api.js";
import { $ } from "/page/dom.js";
import { icon } from "/page/icons.js";
import { t } from "/page/texts.js";

const LONGEST = 5 * 60_000; // milliseconds of a recording
const ROUTE = "/v1/audio/transcriptions";

/** Whether a file holds sound by its type. */
const isSound = (file) => /^(audio|video)\//.test(file.type);

/** Buttons of the composer. `into` gets a text, `refuse` an error in words. */
export class Dictation {
  constructor({ into, refuse }) {
    Object.assign(this, { into, refuse, model: "", recorder: null, request: null });
    $("#listen").addEventListener("click", () => $("#sound").click());
    $("#sound").addEventListener("change", ({ target }) => {
      const [file] = target.files;
      target.value = ""; // the same file may be chosen again
      if (file) this.transcribe(file, file.name);
    });
    $("#record").addEventListener("click", () => this.press());
  }

  /** Show the buttons for this speech model; "" hides them. Browsers give the microphone to https and this machine alone. */
  serve(model) {
    this.model = model;
    const records = !!model && !!navigator.mediaDevices?.getUserMedia && "MediaRecorder" in window;
    $("#listen").hidden = !model;
    $("#record").hidden = !records;
    $("#composer").classList.toggle("listens", !!model);
  }

  /** Transcribe a file that holds sound, where a speech model is served. Returns whether it does. */
  take(file) {
    if (!this.model || !isSound(file)) return false;
    this.transcribe(file, file.name);
    return true;
  }

  /** Start a recording, end it, or drop the transcription that runs. */
  async press() {
    if (this.request) return this.request.abort();
    if (this.recorder) return this.recorder.stop();
    let source;
    try {
      source = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch {
      return this.refuse(t("noMicrophone"));
    }
    const parts = [];
    const recorder = (this.recorder = new MediaRecorder(source));
    const timer = setTimeout(() => recorder.stop(), LONGEST);
    recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
    recorder.addEventListener("stop", () => {
      clearTimeout(timer);
      for (const track of source.getTracks()) track.stop();
      this.recorder = null;
      this.show();
      this.transcribe(new Blob(parts, { type: recorder.mimeType }), "recording");
    });
    recorder.start();
    this.show();
  }

  async transcribe(sound, name) {
    if (this.request) this.request.abort();
    const request = (this.request = new AbortController());
    this.show();
    const form = new FormData();
    form.append("model", this.model);
    form.append("file", sound, name);
    try {
      const { text } = await getForm(ROUTE, form, request.signal);
      if (text) this.into(text);
      else this.refuse(t("noSpeech"));
    } catch (error) {
      if (error.name !== "AbortError") this.refuse(t("notHeard", { reason: error.message || t("errorUnreachable") }));
    } finally {
      if (this.request === request) this.request = null;
      this.show();
    }
  }

  /** What the microphone button does next. */
  show() {
    const state = this.request ? "busy" : this.recorder ? "recording" : "";
    const named = t({ busy: "transcribing", recording: "recordEnd", "": "record" }[state]);
    const one = $("#record");
    one.dataset.state = state;
    one.dataset.label = { busy: "transcribing", recording: "recordEnd", "": "record" }[state];
    one.title = named;
    one.setAttribute("aria-label", named);
    one.firstElementChild.replaceWith(icon(state ? "stop" : "microphone"));
    $("#listen").disabled = !!this.request;
    $("#composer").setAttribute("aria-busy", String(!!this.request));
  }
}
