// Text files that go into the message: by a button, dropped or pasted; as text, in sight.
import { number } from "/page/texts.js";

const LARGEST = 1 << 20; // bytes, whatever the model's context holds
const A_TOKEN = 6; // bytes of one, at most on average: more cannot fit into a context

/** Why a file is not taken: a name of the page's texts, and its values. */
class Refused extends Error {
  constructor(name, values) {
    super(name);
    Object.assign(this, { name, values });
  }
}

/** A file as part of a message: its name, and its text in a fence that no line of it ends. `room`: tokens of the context. Throws
 * Refused where it is too large, empty, or no text. */
async function quoted(file, room) {
  const most = Math.min(LARGEST, room ? room * A_TOKEN : LARGEST);
  const size = (bytes) => `${number(bytes / 1000, bytes < 10_000 ? 1 : 0)} kB`;
  if (file.size > most) throw new Refused("fileLarge", { file: file.name, size: size(file.size), most: size(most) });
  const text = decoded(await file.arrayBuffer());
  if (text === null || text.includes("\0")) throw new Refused("fileNoText", { file: file.name });
  if (!text.trim()) throw new Refused("fileEmpty", { file: file.name });
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${file.name}:\n${fence}\n${text.replace(/\r\n/g, "\n").replace(/\n+$/, "")}\n${fence}`;
}

/** UTF-8 only: with anything else the model would be told letters that nobody wrote. */
function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return null;
  }
}

/** `sound` may take a file, and says so; `into` gets each other file as text, in their order; `refuse` one that cannot be, with a name of the page's texts and its values. */
async function take(files, room, into, refuse, sound) {
  for (const file of files) {
    if (sound(file)) continue;
    try {
      into(await quoted(file, room));
    } catch (error) {
      if (error instanceof Refused) refuse(error.name, error.values);
      else refuse("fileUnread", { file: file.name }); // a folder, or gone meanwhile
    }
  }
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

/** Listen: `chooser` is an input of files, `field` what is pasted into, `place` what shows that files are dragged over the page.
 * `room()` is what the context holds, `open()` whether a message can be written. */
export function attachable({ chooser, field, place, room, open, into, refuse, sound }) {
  const add = (files) => take([...files], room(), into, refuse, sound);
  chooser.addEventListener("change", () => {
    const files = [...chooser.files];
    chooser.value = ""; // the same file may be chosen again
    add(files);
  });
  field.addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData;
    if (!files.length || types.includes("text/plain")) return; // office programs add a picture to their text
    event.preventDefault();
    add(files);
  });
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // or the browser would open the file in place of the page
    event.dataTransfer.dropEffect = open() ? "copy" : "none";
    place.classList.toggle("dropping", open());
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || place.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    place.classList.remove("dropping");
    if (!hasFiles(event)) return;
    event.preventDefault();
    if (open()) add(event.dataTransfer.files);
  });
}
