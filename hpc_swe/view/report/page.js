"use strict";
// What all pages share: loading data, making elements, places (the part of the address after #), keys.
// Policies wrote most of what is shown. It enters the page as text nodes only, never as markup.

const NONCE = document.currentScript.nonce;
const loaded = new Map();

// Each data file is a script that calls this; a page that was opened as a file cannot fetch.
function report(name, value) {
  loaded.set(name, value);
}

function load(name) {
  if (loaded.has(name)) return Promise.resolve(loaded.get(name));
  return new Promise((done, fail) => {
    const script = make("script", {src: `data/${name}.js`, nonce: NONCE});
    const failed = () => fail(new Error(`data/${name}.js is missing or damaged; write the report again`));
    script.onerror = failed;
    script.onload = () => (loaded.has(name) ? done(loaded.get(name)) : failed());
    document.head.append(script);
    script.remove();
  });
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

// A place is a page's name, an optional rest, and values: #episodes?step=12 or #episode/train-step_000012/0007
function place() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [page, ...rest] = path.split("/");
  return {page: PAGES[page] ? page : "curves", rest: rest.join("/"), values: new URLSearchParams(query)};
}

function address(page, values = {}) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null);
  return `#${page}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

const PAGES = {
  curves: (here) => showCurves(here),
  episodes: (here) => showTable(here),
  episode: (here) => showEpisode(here),
  configuration: () => showConfiguration(),
};

let shown = 0; // counts the calls of show, because a slow one may be overtaken

async function show() {
  const turn = ++shown;
  const here = place(), hash = location.hash;
  byId("tip").hidden = true;
  for (const link of document.querySelectorAll("nav a")) {
    const name = here.page === "episode" ? "episodes" : here.page;
    link.setAttribute("aria-current", link.getAttribute("href") === `#${name}` ? "page" : "false");
  }
  let parts;
  try {
    parts = await PAGES[here.page](here);
  } catch (error) {
    parts = [make("p", {class: "note"}, error.message)];
  }
  if (turn !== shown) return;
  const main = byId("main"), isSame = main.dataset.page === here.page && main.dataset.rest === here.rest;
  main.replaceChildren(...parts);
  Object.assign(main.dataset, {page: here.page, rest: here.rest, place: hash});
  if (!isSame) scrollTo(0, 0);
  if (!isSame && here.page === "episodes") select(0); // scrolls to the episode that was read last
  main.dispatchEvent(new Event("shown"));
}

async function showConfiguration() {
  const run = await load("run");
  return [make("h2", {}, "Configuration"), make("pre", {class: "text"}, run.configuration)];
}

// Page -> key -> what it does; a page registers its own.
const KEYS = {curves: {}, episodes: {}, episode: {}, configuration: {}};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input, select, textarea");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping) return;
  if (event.key === "Enter" && event.target.matches("a, button, summary")) return;
  if (event.key === "/") {
    event.preventDefault();
    if (place().page !== "episodes") location.hash = lastTable;
    whenShown("episodes", () => byId("text").focus());
    return;
  }
  const action = KEYS[place().page][event.key];
  if (action) {
    event.preventDefault();
    action();
  }
});

function whenShown(page, action) {
  if (byId("main").dataset.page === page) action();
  else byId("main").addEventListener("shown", () => whenShown(page, action), {once: true});
}

let lastTable = "#episodes"; // where the table was left, with its filters

addEventListener("hashchange", show);
addEventListener("DOMContentLoaded", async () => {
  await show();
  const run = await load("run");
  document.title = `${run.name} - hpc_swe report`;
  byId("name").textContent = run.name;
  byId("notes").replaceChildren(...run.notes.map((note) => make("p", {class: "note"}, note)));
});
