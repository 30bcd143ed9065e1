// Python in a worker: Pyodide, msgspec, and the archive of the engine's modules. It answers one request at a time.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const here = (name) => new URL(name, import.meta.url);

async function bytes(name) {
  const response = await fetch(here(name));
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response.arrayBuffer();
}

async function start() {
  const [python, wheel, archive] = await Promise.all([
    loadPyodide({ indexURL: here("pyodide/").href }),
    bytes("msgspec.whl"),
    bytes("nanovllm.zip"),
  ]);
  python.unpackArchive(wheel, "wheel", { extractDir: "/engine" });
  python.unpackArchive(archive, "zip", { extractDir: "/engine" });
  python.runPython("import sys; sys.path.insert(0, '/engine')");
  return { python, answer: python.pyimport("nanovllm.lab.site.labs.driver").answer };
}

const started = start();
started.then(
  () => postMessage({ kind: "ready" }),
  (error) => postMessage({ kind: "failed", message: String(error.message ?? error) }),
);

onmessage = async ({ data }) => {
  const { id, request } = data;
  const { python, answer } = await started;
  postMessage({ kind: "begun", id });
  try {
    const report = (news) => postMessage({ kind: "news", id, news });
    const text = answer(request, report);
    postMessage({ kind: "answer", id, answer: text, memory: python._module.HEAPU8.length });
  } catch (error) {
    // A fault of this page, not of the reader's code: the driver describes those.
    postMessage({ kind: "answer", id, answer: JSON.stringify({ error: { message: String(error.message) } }) });
  }
};
