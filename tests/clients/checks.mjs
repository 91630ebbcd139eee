// The counterpart of checks.py for npm clients: one JSON line for each check.
export const [URL, SMALL, LARGE] = process.argv.slice(2);

export async function main(checks) {
  let failed = false;
  for (const [check, run] of Object.entries(checks)) {
    let error = "";
    try { await run(); } catch (raised) { console.error(raised); error = `${raised}`.replace(/\s+/g, " ").slice(0, 300); }
    failed ||= error !== "";
    console.log(JSON.stringify({ check, passed: error === "", error, excuse: "" }));
  }
  process.exit(failed ? 1 : 0);
}
