// The page: asks the admin port again and again, and shows what it says.
//
// Before: an operator opens /dashboard. After: the pool as it is, graphs of the last minutes, requests and their timelines. Always: one
// question of a kind is under way at a time, none while the page is hidden, and what comes from outside is shown as text, never as
// markup.

import { BlockMap, decode, tenantOf, USES } from "./block_map.js";
import { Graph } from "./graph.js";

const $ = (id) => document.getElementById(id);
const map = new BlockMap($("map"));
const graphs = { cpu: new Graph($("cpu"), 1), step: new Graph($("step"), 1), queue: new Graph($("queue"), 2), tokens: new Graph($("tokens"), 1) };
const SECOND = 1000;
const HOVER_MS = 120;
let mapEvery = 250; // ms; the server says more for large pools
let before = null;
let blockSize = 0;

// Runs `ask` every so many milliseconds while the page is seen. One that takes longer is not overtaken.
function repeat(ask, every) {
  const again = async () => {
    const began = performance.now();
    if (!document.hidden) {
      try {
        await ask();
        $("trouble").textContent = "";
      } catch (error) {
        $("trouble").textContent = `no answer: ${error.message}`;
      }
    }
    setTimeout(again, Math.max(20, every() - (performance.now() - began)));
  };
  again();
}

async function get(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(10 * SECOND) });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `${answer.status}`);
  return answer;
}

async function showBlocks() {
  map.show(decode(await (await get("dashboard/blocks")).arrayBuffer()));
}

function showLegend() {
  $("legend").replaceChildren(
    ...map.legend().map(([name, colour, count]) => {
      const item = document.createElement("li");
      const patch = document.createElement("i");
      patch.style.background = colour;
      item.append(patch, `${name} ${count.toLocaleString("en")}`);
      return item;
    }),
  );
}

async function showState() {
  const now = await (await get("dashboard/state")).json();
  $("state").textContent = now.state;
  $("state").className = `badge ${now.state}`;
  $("model").textContent = `${now.model}, ${now.num_blocks.toLocaleString("en")} blocks of ${now.block_size} tokens`;
  blockSize = now.block_size;
  mapEvery = now.map_every_ms;
  showLegend();
  const { stats } = now;
  graphs.queue.add(stats.running, stats.waiting);
  $("queue-now").textContent = `${stats.running} run, ${stats.waiting} wait`;
  if (before !== null && before.started_s === now.started_s) {
    const steps = stats.steps - before.stats.steps;
    const cpu = steps ? (now.scheduler_cpu_ns - before.scheduler_cpu_ns) / steps / 1000 : NaN;
    const step = steps ? (now.steps_ns - before.steps_ns) / steps / 1e6 : NaN;
    const tokens = (stats.scheduled_tokens - before.stats.scheduled_tokens) / (now.now_s - before.now_s);
    graphs.cpu.add(cpu);
    graphs.step.add(step);
    graphs.tokens.add(tokens);
    $("cpu-now").textContent = steps ? `${cpu.toFixed(0)} µs` : "idle";
    $("step-now").textContent = steps ? `${step.toFixed(1)} ms` : "idle";
    $("tokens-now").textContent = tokens.toFixed(0);
  }
  before = now;
}

async function showRequests() {
  const { waiting } = await (await get("debug/stall")).json();
  $("requests").replaceChildren(
    ...waiting.map((request) => {
      const row = document.createElement("tr");
      const link = document.createElement("a");
      link.href = "#";
      link.textContent = request.request_id;
      link.addEventListener("click", (event) => {
        event.preventDefault();
        explain(request.request_id);
      });
      const name = document.createElement("td");
      name.append(link);
      row.append(name, ...[request.place, said(request.waits_for)].map(cell));
      return row;
    }),
  );
}

function cell(text) {
  const made = document.createElement("td");
  made.textContent = text;
  return made;
}

function said(reason) {
  if (reason === null || reason === undefined) return "";
  return typeof reason === "string" ? reason : reason.text || reason.name || JSON.stringify(reason);
}

async function explain(id) {
  $("request").value = id;
  const at = encodeURIComponent(id);
  try {
    const told = await (await get(`debug/explain/${at}`)).json();
    $("timeline").textContent = told.text || JSON.stringify(told, null, 2);
  } catch (error) {
    $("timeline").textContent = error.message;
  }
}

// What the block under the pointer is, and, a moment later, whose tables name it.
let hovered = null;
async function hover(event) {
  const block = map.blockAt(event.clientX, event.clientY);
  const tip = $("tip");
  tip.hidden = block === null;
  if (block === null || block === hovered) return;
  hovered = block;
  const box = $("map-frame").getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX - box.left + 14, box.width - 220)}px`;
  tip.style.top = `${event.clientY - box.top + 14}px`;
  const tenant = tenantOf(map.map, block);
  const first = `block ${block}: ${USES[map.map.uses[block]]}${tenant === null ? "" : `, of ${tenant}`}`;
  tip.textContent = first;
  await new Promise((wake) => setTimeout(wake, HOVER_MS));
  if (hovered !== block) return;
  const { namings } = await (await get(`debug/block/${block}`)).json();
  if (hovered !== block) return;
  const lines = namings.map(({ request_id, group, index }) => {
    const start = index * blockSize;
    return `${request_id}: entry ${index}, tokens ${start} to ${start + blockSize - 1}${group ? `, group ${group}` : ""}`;
  });
  tip.textContent = [first, ...lines].join("\n");
}

$("map").addEventListener("mousemove", (event) => hover(event).catch(() => {}));
$("map").addEventListener("mouseleave", () => {
  $("tip").hidden = true;
  hovered = null;
});
$("paint").addEventListener("change", (event) => {
  map.paint = event.target.value;
  map.draw();
  showLegend();
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  explain($("request").value);
});
window.blocktable = { map }; // for tests, and for whoever opens the console

repeat(showBlocks, () => mapEvery);
repeat(showState, () => SECOND);
repeat(showRequests, () => 2 * SECOND);
