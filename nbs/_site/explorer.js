// The results explorer: filters, a table, curves and matrices. The view is kept in the address.
(async () => {
"use strict";
const packed = Uint8Array.from(atob(RESULTS), c => c.charCodeAt(0));
const {runs, methods, benchmarks, grids, metrics} = await new Response(
  new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
const byId = id => document.getElementById(id);
const MOST = 6; // runs whose curves can be told apart
const NONE = "none"; // memory of methods without one
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"]; // for several runs of one method
const START = {grid: "table1" in grids ? "table1" : "", benchmark: "", memory: "", protocol: "",
               metric: "RA", method: "", sort: "mean.desc", search: "", select: ""};
const state = {};
const chosen = new Set(); // stamps

// ---- words

const html = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const number = (x, digits = 2) => x == null ? "" : x.toFixed(digits).replace("-", "−");
const memory = r => r.memory == null ? NONE : String(r.memory);
const size = m => m === NONE ? "none" : Number(m).toLocaleString("en");
const name = r => methods[r.method].label + (r.memory == null ? "" : ` ${size(r.memory)}`);
const long = r => `${name(r)}, ${benchmarks[r.benchmark]}, ${r.protocol}` + (r.varied ? `, ${r.varied}` : "");
const value = r => r.values[state.metric];
const ends = v => v[1] == null ? "" : `[${number(v[1])}, ${number(v[2])}]`;

// ---- curves

function curve(r, which) { // "seen": mean of the tasks seen so far, or "first": the first task
  return r.matrix.a.slice(1).map((row, j) => {
    const some = row.slice(0, which === "seen" ? j + 1 : 1), [low, high] = r.matrix.band[which][j];
    return {x: j + 1, y: some.includes(null) ? null : some.reduce((s, v) => s + v, 0) / some.length, low, high};
  }).filter(p => p.y != null);
}

// ---- the address

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const k in START) state[k] = given.get(k) ?? START[k];
  if (!(state.metric in metrics)) state.metric = START.metric;
  chosen.clear();
  const stamps = new Set(runs.map(r => r.stamp));
  state.select.split(",").filter(s => stamps.has(s)).slice(0, MOST).forEach(s => chosen.add(s));
}

function write() {
  state.select = [...chosen].join(",");
  const kept = Object.entries(state).filter(([k, v]) => v !== START[k]);
  const hash = "#" + new URLSearchParams(kept).toString().replaceAll("%2C", ",");
  history.replaceState(null, "", hash);
  byId("here").href = hash;
}

// ---- filters

const options = {
  grid: () => [["", "all"], ...[...new Set(runs.map(r => r.grid))].map(g => [g, g + (grids[g] ? `: ${grids[g]}` : "")])],
  benchmark: () => [["", "all"], ...Object.entries(benchmarks)],
  memory: () => [["", "all"], ...[...new Set(runs.map(memory))].sort((a, b) => (+a || 0) - (+b || 0)).map(m => [m, size(m)])],
  protocol: () => [["", "all"], ...[...new Set(runs.map(r => r.protocol))].sort().map(p => [p, p])],
  metric: () => Object.keys(metrics).map(m => [m, m]),
};

function fill() {
  for (const [id, list] of Object.entries(options)) {
    byId(id).innerHTML = list().map(([v, t]) => `<option value="${html(v)}">${html(t)}</option>`).join("");
    byId(id).addEventListener("change", () => { state[id] = byId(id).value; show(); });
  }
  for (const [m, {label}] of Object.entries(methods)) byId("methods").insertAdjacentHTML("beforeend",
    `<label><input type="checkbox" value="${html(m)}"> ${html(label)}</label> `);
  byId("methods").addEventListener("change", () => { state.method = ticked().join(","); show(); });
}

const ticked = () => [...byId("methods").querySelectorAll(":checked")].map(c => c.value);

const of = {benchmark: r => r.benchmark, memory, protocol: r => r.protocol, method: r => r.method};

function offer() { // only what this grid has
  const here = runs.filter(r => !state.grid || r.grid === state.grid);
  const has = (key, v) => v === "" || (key === "metric" ? here.some(r => r.values[v]) : here.some(r => of[key](r) === v));
  for (const key of ["benchmark", "memory", "protocol", "metric"]) {
    for (const o of byId(key).options) o.hidden = o.disabled = !has(key, o.value);
    if (!has(key, state[key])) byId(key).value = state[key] = [...byId(key).options].find(o => !o.hidden)?.value ?? "";
  }
  for (const c of byId("methods").querySelectorAll("input")) {
    c.parentElement.hidden = !has("method", c.value);
    if (c.parentElement.hidden) c.checked = false;
  }
}

function setFilters() {
  for (const id in options) {
    byId(id).value = state[id];
    if (byId(id).selectedIndex < 0) { state[id] = START[id]; byId(id).value = state[id]; }
  }
  const names = state.method.split(",");
  for (const c of byId("methods").querySelectorAll("input")) c.checked = names.includes(c.value);
}

function fitting() {
  const names = ticked();
  return runs.filter(r => value(r) && (!state.grid || r.grid === state.grid)
    && (!state.benchmark || r.benchmark === state.benchmark) && (!state.memory || memory(r) === state.memory)
    && (!state.protocol || r.protocol === state.protocol) && (!names.length || names.includes(r.method)));
}

// ---- the table

const COLUMNS = [ // key, title, what is sorted by, what is shown
  ["method", "Method", r => Object.keys(methods).indexOf(r.method), r =>
    `<label><input type="checkbox" value="${r.stamp}"${chosen.has(r.stamp) ? " checked" : ""}
      aria-label="Select ${html(long(r))}"> ${html(methods[r.method].label)}</label>`],
  ["memory", "Memory", r => r.memory ?? 0, r => r.memory == null ? "" : size(r.memory)],
  ["mean", "Mean", r => value(r)[0], r => `<a class="mean" href="${encodeURI(r.page)}"
      aria-describedby="tip">${number(value(r)[0])}</a>`],
  ["interval", "95 % interval", r => value(r)[2] - value(r)[1], r => ends(value(r))],
  ["paper", "Paper", r => r.paper[state.metric] ?? -1e9, r => number(r.paper[state.metric])],
  ["seeds", "Seeds", r => r.seeds.length, r => r.seeds.length],
  ["benchmark", "Benchmark", r => Object.keys(benchmarks).indexOf(r.benchmark), r => html(benchmarks[r.benchmark])],
  ["protocol", "Protocol", r => r.protocol, r => r.protocol],
  ["varied", "Varied", r => r.varied, r => html(r.varied)],
  ["grid", "Grid", r => r.grid, r => r.grid],
];
const column = key => COLUMNS.findIndex(c => c[0] === key);
const WORDS = ["protocol", "varied", "grid"]; // sorted as such, the rest by number
const RIGHT = ["memory", "mean", "interval", "paper", "seeds"];

let table, quiet = false;

function makeTable() {
  DataTable.ext.errMode = "throw";
  table = new DataTable("#runs", {
    data: [], deferRender: true, autoWidth: false, pageLength: 25, lengthChange: false,
    layout: {topStart: "search", topEnd: "info", bottomStart: null, bottomEnd: "paging"},
    language: {search: "Search", info: "_TOTAL_ runs", infoEmpty: "no run", infoFiltered: "of _MAX_",
               emptyTable: "No run fits these choices.", zeroRecords: "No run fits this search."},
    columns: COLUMNS.map(([key, title, by, shown]) => ({
      title, data: null, orderSequence: ["asc", "desc"], type: WORDS.includes(key) ? "string" : "num",
      className: RIGHT.includes(key) ? "text-right" : "", defaultContent: "",
      render: (_, kind, r) => kind === "sort" || kind === "type" ? by(r)
        : kind === "filter" && key === "method" ? methods[r.method].label : shown(r)})),
    createdRow: (tr, r) => { tr.dataset.stamp = r.stamp; },
  });
  table.on("order", () => { if (quiet) return; const [c, way] = table.order()[0] ?? [];
    if (c !== undefined) { state.sort = `${COLUMNS[c][0]}.${way}`; write(); } });
  table.on("search", () => { if (!quiet) { state.search = table.search(); write(); } });
  byId("runs").addEventListener("change", e => choose(e.target));
  byId("runs").closest(".dt-layout-table").classList.add("table-wrapper"); // it scrolls, the search does not
}

function show() { // everything, after a choice
  offer();
  const found = fitting(), [key, way] = state.sort.split(".");
  quiet = true;
  table.clear().rows.add(found);
  table.column(column("paper")).visible(found.some(r => r.paper[state.metric] !== undefined), false);
  table.column(column("varied")).visible(found.some(r => r.varied), false);
  table.column(column("grid")).visible(!state.grid, false);
  table.column(column("benchmark")).visible(!state.benchmark, false);
  table.column(column("mean")).title(state.metric);
  table.order([Math.max(column(key), 0), way === "asc" ? "asc" : "desc"]).search(state.search).draw();
  quiet = false;
  details();
  write();
  dispatchEvent(new Event("resize")); // site.js looks whether the table is wide
}

function choose(box) {
  if (!box.checked) chosen.delete(box.value);
  else if (chosen.size < MOST) chosen.add(box.value);
  else { box.checked = false; return; }
  details();
  write();
}

// ---- every seed of a number, at the pointer or at the focus

function tip(e) {
  const a = e.target.closest?.("a.mean"), box = byId("tip");
  if (!a) { box.hidden = true; return; }
  const r = table.row(a.closest("tr")).data(), v = value(r);
  box.innerHTML = `<b>${html(state.metric)} ${number(v[0])}</b> ${ends(v)}<br>${html(long(r))}<br>` +
    r.seeds.map((s, i) => `seed ${s}: ${number(v[3 + i])}`).join(", ");
  box.hidden = false;
  const at = a.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8)) + scrollX}px`;
  box.style.top = `${at.bottom + 6 + scrollY}px`;
}

// ---- curves and matrices of what is selected

function styleOf(list) { // colour of the method; a dash for its second, third … run
  const seen = {};
  return list.map(r => ({color: methods[r.method].color, dash: DASHES[(seen[r.method] = (seen[r.method] ?? -1) + 1) % DASHES.length]}));
}

function ticks(low, high) {
  const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find(m => unit * m >= raw), out = [];
  for (let t = Math.ceil(low / step) * step; t <= high + 1e-9; t += step) out.push(t);
  return out;
}

function plot(list, styles, which, title) {
  const W = 440, H = 270, L = 44, R = 12, T = 12, B = 40, lines = list.map(r => curve(r, which));
  const all = lines.flat(), n = Math.max(2, ...all.map(p => p.x));
  let low = Math.min(...all.map(p => p.low ?? p.y)), high = Math.max(...all.map(p => p.high ?? p.y));
  const room = Math.max((high - low) * .06, .5);
  low -= room; high += room;
  const x = v => L + (v - 1) / (n - 1) * (W - L - R), y = v => T + (high - v) / (high - low) * (H - T - B);
  const path = ps => ps.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
  const grid = ticks(low, high).map(t => `<line class="rule" x1="${L}" x2="${W - R}" y1="${y(t)}" y2="${y(t)}"/>
    <text x="${L - 6}" y="${y(t) + 4}" text-anchor="end">${number(t, high - low < 5 ? 1 : 0)}</text>`);
  const below = Array.from({length: n}, (_, i) => i + 1).filter(i => n <= 10 || i % 2).map(i =>
    `<text x="${x(i)}" y="${H - B + 18}" text-anchor="middle">${i}</text>`);
  const drawn = lines.map((ps, i) => {
    const banded = ps.filter(p => p.low != null), s = `style="--c:${styles[i].color}"`;
    const band = banded.length > 1 ? `<path class="band" ${s} d="${path([...banded.map(p => [p.x, p.low]),
      ...banded.map(p => [p.x, p.high]).reverse()])}Z"/>` : "";
    return band + `<path class="curve" ${s} stroke-dasharray="${styles[i].dash}" d="${path(ps.map(p => [p.x, p.y]))}"/>` +
      ps.map(p => `<circle class="dot" ${s} cx="${x(p.x)}" cy="${y(p.y)}" r="3.4"><title>${html(long(list[i]))}, after task ${p.x}: ${
        number(p.y)}${p.low != null ? ` [${number(p.low)}, ${number(p.high)}]` : ""}</title></circle>`).join("");
  });
  const what = `${title} while tasks are learnt: ${list.map((r, i) => `${long(r)}, at the end ${number(lines[i].at(-1)?.y)}`).join("; ")}`;
  return `<figure><figcaption>${title}</figcaption><svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${html(what)}">
    ${grid.join("")}${below.join("")}${drawn.join("")}
    <text x="${(L + W - R) / 2}" y="${H - 4}" text-anchor="middle">tasks learnt</text></svg></figure>`;
}

const VIRIDIS = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];

function shade(t) {
  const s = Math.max(0, Math.min(t, 1)) * (VIRIDIS.length - 1), i = Math.min(Math.floor(s), VIRIDIS.length - 2);
  return `rgb(${VIRIDIS[i].map((c, k) => Math.round(c + (VIRIDIS[i + 1][k] - c) * (s - i)))})`;
}

function heat(r) {
  const {a, low, high, of} = r.matrix, T = a[0].length;
  const cell = v => v == null ? "<td></td>" :
    `<td style="background:${shade((v - low) / (high - low))};color:${(v - low) / (high - low) > .6 ? "#000" : "#fff"}"
      title="${number(v)}">${number(v, 0)}</td>`;
  return `<figure><figcaption><a href="${encodeURI(r.page)}">${html(long(r))}</a></figcaption><div class="table-wrapper">
    <table class="matrix"><caption>${html(of)} after task (row) on task (column), mean over seeds</caption>
    <thead><tr><th scope="col">after</th>${Array.from({length: T}, (_, i) => `<th scope="col">${i + 1}</th>`).join("")}</tr></thead>
    <tbody>${a.map((row, j) => `<tr><th scope="row">${j}</th>${row.map(cell).join("")}</tr>`).join("")}</tbody></table></div></figure>`;
}

function details() {
  const list = [...chosen].map(s => runs.find(r => r.stamp === s && (!state.grid || r.grid === state.grid)) ?? runs.find(r => r.stamp === s));
  const styles = styleOf(list), drawn = list.map((r, i) => [r, styles[i]]).filter(([r]) => r.matrix?.of === "accuracy");
  byId("chosen").innerHTML = list.map((r, i) => `<li><svg class="key" viewBox="0 0 30 10" aria-hidden="true"><path class="curve"
    style="--c:${styles[i].color}" stroke-dasharray="${styles[i].dash}" d="M0,5H30"/></svg> <a href="${encodeURI(r.page)}">${html(long(r))}</a>
    <button type="button" data-stamp="${r.stamp}" aria-label="Remove ${html(long(r))}">×</button></li>`).join("") ||
    "<li>Nothing yet: tick a run in the table.</li>";
  const [rs, ss] = [drawn.map(d => d[0]), drawn.map(d => d[1])];
  byId("curves").innerHTML = rs.length ? plot(rs, ss, "seen", "Accuracy (%), mean of the tasks seen") +
    plot(rs, ss, "first", "Accuracy (%) on the first task") : "";
  byId("matrices").innerHTML = list.filter(r => r.matrix).map(heat).join("");
}

// ---- start

fill();
makeTable();
byId("chosen").addEventListener("click", e => {
  const stamp = e.target.dataset?.stamp;
  if (!stamp) return;
  chosen.delete(stamp);
  for (const box of byId("runs").querySelectorAll(`input[value="${stamp}"]`)) box.checked = false;
  details();
  write();
});
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, tip);
document.addEventListener("keydown", e => { if (e.key === "Escape") byId("tip").hidden = true; });
function restore() { read(); setFilters(); show(); }
addEventListener("hashchange", restore);
restore();
})();
