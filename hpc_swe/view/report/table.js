"use strict";
// The table of all episodes: filtered by the form above it, sorted by a click on a column's head.

const MOST_ROWS = 200;
const SHOWN = [
  ["step", "step", true], ["split", "split"], ["task_id", "task"], ["outcome", "outcome"],
  ["reward", "reward", true], ["exit_status", "exit"], ["turns", "turns", true],
  ["sampled_tokens", "tokens", true], ["trained", "trained"], ["age", "age", true],
  ["group_id", "group", true], ["index", "index", true], ["sampling", "decoding"],
];
const FILTERS = ["text", "step", "task", "split", "outcome", "exit", "sort"];
const table = {rows: null, fitting: [], selected: 0, limit: MOST_ROWS, found: null};

async function rowsOfRun() {
  if (table.rows) return table.rows;
  const index = await load("index");
  const whole = new Set(index.whole);
  table.rows = index.rows.map((cells, position) => {
    const row = {position, isWhole: whole.has(position)};
    index.columns.forEach((name, n) => { row[name] = cells[n]; });
    row.id = `${row.table}/${String(row.number).padStart(4, "0")}`;
    row.age = row.step === null || row.dispatch_step === null ? null : row.step - row.dispatch_step;
    row.text = `${row.split}-${row.group_id}-${row.index} ${row.task_id} ${row.sampling} ${row.outcome} ${row.exit_status}`
      .toLowerCase();
    return row;
  });
  loaded.delete("index");
  return table.rows;
}

async function showTable(here) {
  const rows = await rowsOfRun();
  lastTable = location.hash || "#episodes";
  const values = Object.fromEntries(FILTERS.map((name) => [name, here.values.get(name) || ""]));
  if (!table.found || table.found.text !== values.text) table.found = null;
  table.fitting = sorted(rows.filter(fits(values)), values.sort);
  table.selected = Math.max(0, table.fitting.findIndex((row) => row.id === table.opened));
  table.limit = table.selected + MOST_ROWS;
  const body = make("tbody", {id: "rows"});
  const view = make("div", {class: "scroll"}, make("table", {class: "episodes"}, head(values), body));
  const parts = [form(rows, values), make("p", {id: "count", role: "status"}, counted(rows)), view];
  fill(body);
  return parts;
}

function fits(values) {
  const text = values.text.toLowerCase();
  const range = /^(\d+)(?:-(\d+))?$/.exec(values.step);
  return (row) =>
    (!text || row.text.includes(text) || (table.found && table.found.ids.has(row.id))) &&
    (!values.step || (range !== null && row.step !== null && row.step >= +range[1] && row.step <= +(range[2] || range[1]))) &&
    (!values.task || row.task_id.includes(values.task)) &&
    (!values.split || row.split === values.split) &&
    (!values.outcome || row.outcome === values.outcome) &&
    (!values.exit || row.exit_status === values.exit);
}

function sorted(rows, order) {
  const name = order.replace(/^-/, ""), sign = order.startsWith("-") ? -1 : 1;
  if (!SHOWN.some(([column]) => column === name)) return rows;
  const isEmpty = (value) => value === null || value === "";
  return [...rows].sort((one, two) => {
    const [a, b] = [one[name], two[name]];
    if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b); // empty cells are last in both directions
    return a < b ? -sign : a > b ? sign : 0;
  });
}

function form(rows, values) {
  const change = (name, value) => {
    const next = {...values, [name]: value};
    history.replaceState(null, "", address("episodes", next));
    show().then(() => refocus(name));
  };
  const input = (name, hint) => make("input", {
    id: name, type: "search", value: values[name], placeholder: hint, "aria-label": hint,
    oninput: (event) => change(name, event.target.value)});
  const select = (name, column) => make("select", {
    id: name, "aria-label": name, onchange: (event) => change(name, event.target.value)},
    make("option", {value: ""}, `any ${name}`),
    ...options(rows, column).map(([value, count]) =>
      make("option", {value, selected: value === values[name]}, `${value} (${number(count)})`)));
  return make("form", {class: "filters", onsubmit: (event) => { event.preventDefault(); searchTexts(values); }},
    input("text", "filter ( / )"),
    make("button", {type: "submit", title: "Search the conversations, patches and test results, too"}, "search texts"),
    input("task", "task"), input("step", "step, or 3-8"),
    select("split", "split"), select("outcome", "outcome"), select("exit", "exit_status"),
    make("button", {type: "button", onclick: () => { location.hash = "#episodes"; }}, "clear"));
}

function refocus(name) {
  const element = byId(name);
  if (!element) return;
  element.focus();
  if (element.type === "search") element.setSelectionRange(element.value.length, element.value.length);
}

function options(rows, column) {
  const counts = new Map();
  for (const row of rows) counts.set(row[column], (counts.get(row[column]) || 0) + 1);
  counts.delete("");
  return [...counts].sort();
}

function head(values) {
  const name = values.sort.replace(/^-/, ""), isDown = values.sort.startsWith("-");
  return make("thead", {}, make("tr", {}, ...SHOWN.map(([column, title, isNumber]) => {
    const isSorted = column === name;
    const next = isSorted && !isDown ? `-${column}` : column;
    return make("th", {class: isNumber ? "number" : "", "aria-sort": isSorted ? (isDown ? "descending" : "ascending") : null},
      make("a", {href: address("episodes", {...values, sort: next})}, title, isSorted ? (isDown ? " \u25be" : " \u25b4") : ""));
  })));
}

function fill(body) {
  const rows = table.fitting.slice(0, table.limit).map((row, n) => make("tr", {
    class: `${n === table.selected ? "selected" : ""} ${row.isWhole ? "" : "absent"}`,
    onclick: (event) => event.target.closest("a") || open(n)},
    ...SHOWN.map(([column, , isNumber]) => cell(row, column, isNumber))));
  const left = table.fitting.length - rows.length;
  if (left > 0) {
    const more = () => { table.limit += 5 * MOST_ROWS; fill(body); };
    rows.push(make("tr", {}, make("td", {colspan: SHOWN.length}, make("button", {onclick: more}, `${number(left)} more`))));
  }
  body.replaceChildren(...rows);
}

function cell(row, column, isNumber) {
  const value = row[column];
  const text = typeof value === "boolean" ? (value ? "yes" : "no") : isNumber ? number(value) : value ?? "";
  const content = column === "task_id" ? make("a", {href: address(`episode/${row.id}`)}, text) : text;
  const kind = isNumber ? "number" : column === "task_id" ? "name" : column === "outcome" ? `outcome ${row.outcome}` : "";
  return make("td", {class: kind}, content);
}

function open(position) {
  table.opened = table.fitting[position].id; // at once, for whoever presses keys faster than pages are shown
  location.hash = address(`episode/${table.opened}`);
}

function counted(rows) {
  const whole = table.fitting.filter((row) => row.isWhole).length;
  return `${number(table.fitting.length)} of ${number(rows.length)} episodes; ${number(whole)} of them can be opened`;
}

function select(step) {
  const last = Math.min(table.fitting.length, table.limit) - 1;
  table.selected = Math.max(0, Math.min(last, table.selected + step));
  [...byId("rows").children].forEach((row, n) => row.classList.toggle("selected", n === table.selected));
  byId("rows").children[table.selected]?.scrollIntoView({block: "nearest"});
}

KEYS.episodes = {
  j: () => select(1),
  k: () => select(-1),
  Enter: () => table.fitting.length && open(table.selected),
};

// Loads the written episodes that fit the other filters, one by one, and keeps those whose texts contain the filter's.
async function searchTexts(values) {
  const text = values.text.toLowerCase();
  const rows = table.rows.filter((row) => row.isWhole && fits({...values, text: ""})(row));
  const found = {text: values.text, ids: new Set()};
  const turn = shown;
  for (const [n, row] of rows.entries()) {
    if (turn !== shown) return;
    if (n % 20 === 0) byId("count").textContent = `searched ${number(n)} of ${number(rows.length)}`;
    const episode = await load(row.id);
    loaded.delete(row.id);
    if (contains(episode, text)) found.ids.add(row.id);
  }
  table.found = found;
  await show();
}

function contains(value, text) {
  if (typeof value === "string") return value.toLowerCase().includes(text);
  return value !== null && typeof value === "object" && Object.values(value).some((each) => contains(each, text));
}
