// Asks for the state again and again, and shows it. Programs choose their names: texts are set as textContent only.
"use strict";
(() => {
  // Who wants less motion gets less of it.
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const period = () => (calm.matches ? 5000 : 1000);
  const LIMIT = 10000; // Milliseconds for an answer.
  const SPAN = 600000; // Milliseconds of the plots.
  const GAP = 12000; // A line is broken where nothing is known for so long.
  const WIDTH = 400, HEIGHT = 130, LEFT = 4, TOP = 20, BOTTOM = 20;

  const byId = (id) => document.getElementById(id);
  const make = (name, parent, className) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    parent.append(made);
    return made;
  };
  // What stays as it is is not touched, so that a selection and a reader's place in it stay.
  const say = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  };

  // Numbers, as baton top writes them.
  const bytes = (count) => {
    if (count === null || count === undefined) return "–";
    const units = ["", "k", "M", "G", "T", "P"];
    let value = Math.max(0, count), unit = 0;
    while (value >= 999.5 && unit + 1 < units.length) {
      value /= 1000;
      unit += 1;
    }
    return (unit > 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)) + units[unit];
  };
  const duration = (micros) => {
    if (!micros) return "–";
    if (micros < 1e3) return `${micros} µs`;
    if (micros < 1e6) return `${(micros / 1e3).toFixed(micros < 1e4 ? 1 : 0)} ms`;
    if (micros < 6e7) return `${(micros / 1e6).toFixed(1)} s`;
    if (micros < 3.6e9) return `${Math.floor(micros / 6e7)} min`;
    if (micros < 1.728e11) return `${Math.floor(micros / 3.6e9)} h`;
    return `${Math.floor(micros / 8.64e10)} d`;
  };
  const count = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;
  const percent = (share) => `${(100 * share).toFixed(0)} %`;

  // Tables: the first cell of a row is its heading.
  const fill = (id, rows) => {
    const table = byId(id), body = table.tBodies[0], headings = table.tHead.rows[0].cells;
    while (body.rows.length > rows.length) body.deleteRow(-1);
    rows.forEach((texts, at) => {
      const line = body.rows[at] || body.insertRow();
      texts.forEach((text, place) => {
        let cell = line.cells[place];
        if (!cell) {
          cell = make(place ? "td" : "th", line, headings[place].className);
          if (!place) cell.scope = "row";
        }
        say(cell, text);
      });
    });
  };
  const list = (id, texts) => {
    const parent = byId(id);
    while (parent.children.length > texts.length) parent.lastChild.remove();
    texts.forEach((text, at) => say(parent.children[at] || make("li", parent), text));
  };

  // Plots.
  const drawing = (name, parent, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent.append(made);
    return made;
  };
  const history = []; // Points of the plots: the time, and a number for each line.
  const plot = (title, unit, names, format) => {
    const figure = make("figure", byId("plots"));
    make("figcaption", figure).textContent = title;
    const svg = drawing("svg", figure, { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    for (const y of [TOP, HEIGHT - BOTTOM]) drawing("line", svg, { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
    const most = drawing("text", svg, { x: LEFT, y: TOP - 5 });
    drawing("text", svg, { x: LEFT, y: HEIGHT - 5 }).textContent = "10 min ago";
    drawing("text", svg, { x: WIDTH - LEFT, y: HEIGHT - 5, "text-anchor": "end" }).textContent = "now";
    const key = make("p", figure, "key");
    const lines = names.map((name, at) => {
      const entry = make("span", key);
      const sample = drawing("svg", entry, { viewBox: "0 0 24 8", "aria-hidden": "true" });
      drawing("path", sample, { class: `line${at}`, d: "M0 4H24" });
      return { name, path: drawing("path", svg, { class: `line${at}` }), text: make("span", entry) };
    });
    return { title, unit, format, svg, most, lines };
  };
  const plots = [
    plot("Bytes a second", "B/s", ["sent", "received"], bytes),
    plot("Connections", "", ["on the NIC", "in the kernel"], (number) => bytes(number)),
    plot("Moves a second", "/s", ["moves"], bytes),
    plot("Processors that NICs keep busy", "", ["busy"], (number) => number.toFixed(2)),
  ];
  const draw = () => {
    const now = performance.now();
    while (history.length && history[0].at < now - SPAN) history.shift();
    plots.forEach(({ title, unit, format, svg, most, lines }, which) => {
      const top = Math.max(...history.map(({ values }) => Math.max(...values[which])), 0) || 1;
      const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / top;
      const x = (at) => WIDTH - ((now - at) / SPAN) * WIDTH;
      say(most, `${format(top)}${unit && ` ${unit}`}`);
      const said = lines.map(({ name, path, text }, line) => {
        let d = "", before = -Infinity;
        for (const { at, values } of history) {
          d += `${at - before > GAP ? "M" : "L"}${x(at).toFixed(1)} ${y(values[which][line]).toFixed(1)}`;
          before = at;
        }
        path.setAttribute("d", d);
        const last = history.length ? format(history[history.length - 1].values[which][line]) : "–";
        const words = `${name} ${last}${unit && ` ${unit}`}`;
        say(text, words);
        return words;
      });
      svg.setAttribute("aria-label", `${title} over the last ten minutes, at most ${format(top)}. Now: ${said.join(", ")}.`);
    });
  };

  // What is asked for.
  const wanted = { sort: "rate", from: 0, filter: "" };
  let paused = false, timer = 0, asking = null;
  const agents = new Map(); // The processes of each Baton's agent and NICs, to notice others in their place.

  // Announced by screen readers: only what changes.
  const status = (text) => say(byId("status"), text);

  const newProcesses = (batons) => {
    const found = [];
    for (const { number, socket, agent, nics } of batons) {
      const before = agents.get(number);
      if (before && before.agent !== agent) found.push(`The agent at ${socket} was started anew.`);
      else if (before) {
        nics.forEach((nic, at) => {
          if (before.nics[at] !== undefined && before.nics[at] !== nic.process) found.push(`NIC ${at} was started anew.`);
        });
      }
      agents.set(number, { agent, nics: nics.map((nic) => nic.process) });
    }
    return found.join(" ");
  };

  const sum = (list, of) => list.reduce((all, one) => all + of(one), 0);

  const show = (state) => {
    const { batons, workers, sums, connections, programs } = state;
    const several = batons.length > 1;
    const whose = state.user === 0 ? "of all users" : "of your own";
    say(byId("summary"), `${count(batons.length, "Baton")}. ${count(sums.nic + sums.kernel, "connection")} ${whose}: ` +
      `${sums.nic.toLocaleString("en")} on the NIC, ${sums.kernel.toLocaleString("en")} in the kernel.`);
    list("troubles", state.troubles);
    const numbers = batons.some(({ nics }) => nics.length > 1);
    fill("connections", connections.rows.map((row) => [
      row.local,
      row.peer,
      row.place === "nic" && numbers && row.nic !== null ? `nic${row.nic}` : row.place,
      bytes(row.sent_per_second),
      bytes(row.received_per_second),
      duration(row.rtt_us),
      row.retransmitted ? String(row.retransmitted) : "–",
      String(row.moves),
      duration(row.for_us),
      `${row.program}/${row.process}`,
      row.reason,
    ]));
    wanted.from = connections.from;
    const last = connections.from + connections.rows.length;
    say(byId("range"), connections.matching === 0 ? "(none)"
      : `${connections.from + 1} to ${last} of ${connections.matching.toLocaleString("en")}`);
    byId("previous").disabled = connections.from === 0;
    byId("next").disabled = last >= connections.matching;
    wanted.length = connections.length;
    fill("programs", programs.map((one) => [
      one.name, String(one.nic), String(one.kernel), bytes(one.sent), bytes(one.received),
      one.saved === null ? "–" : percent(one.saved),
    ]));
    const left = (all, shown) => (all > shown ? `(${all - shown} more)` : "");
    say(byId("more-programs"), left(state.programs_in_all, programs.length));
    fill("workers", workers.map((one) => [
      (several ? `${one.baton}: ` : "") + one.name,
      percent(one.busy), String(one.connections), bytes(one.frames), bytes(one.doorbells),
    ]));
    say(byId("more-workers"), left(state.workers_in_all, workers.length));
    list("batons", batons.map((one) => `${several ? `${one.number}: ` : ""}${one.socket}, agent ${one.agent}, ` +
      `up for ${duration(one.for_us)}: ${count(one.moves, "move")}, ${one.failed} failed, ` +
      `${one.recovered} restored after a NIC's death, ${one.lost} lost`));
    report(state.report);
    history.push({
      at: performance.now(),
      values: [
        [sums.sent, sums.received],
        [sums.nic, sums.kernel],
        [sum(batons, (one) => one.moves_per_second)],
        [sum(workers, (one) => one.busy)],
      ],
    });
    draw();
    const anew = newProcesses(batons);
    if (paused) return;
    if (anew) status(anew);
    else if (batons.length === 0) status("No Baton answers here; “baton run -- PROGRAM” or “baton up” starts one.");
    else if (!/anew/.test(byId("status").textContent)) status("It is up to date.");
  };

  const report = (at) => {
    const place = byId("report");
    if (at === null) return say(place, "No report of a bench yet.");
    let link = place.querySelector("a");
    if (!link) {
      place.textContent = "";
      link = make("a", place);
      link.href = "report";
    }
    say(link, `Report of the last bench, ${new Date(at * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`);
  };

  const ask = async () => {
    clearTimeout(timer);
    if (asking) asking.abort();
    const own = new AbortController();
    asking = own;
    const late = setTimeout(() => own.abort(), LIMIT);
    try {
      const query = new URLSearchParams({ sort: wanted.sort, from: wanted.from, filter: wanted.filter });
      const answer = await fetch(`state?${query}`, { signal: own.signal, cache: "no-store" });
      if (answer.status === 400) {
        say(byId("refused"), await answer.text());
        [wanted.filter, wanted.from] = ["", 0];
      } else if (answer.ok) {
        const state = await answer.json();
        if (asking === own) show(state);
      } else status(`“baton page” answers: ${answer.status} ${answer.statusText}`);
    } catch {
      // A later question may have ended this one.
      if (asking === own) status("“baton page” does not answer; it is asked again.");
    } finally {
      clearTimeout(late);
      if (asking === own) {
        asking = null;
        if (!paused && !document.hidden) timer = setTimeout(ask, period());
      }
    }
  };

  byId("pause").addEventListener("click", () => {
    paused = !paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    if (paused) {
      clearTimeout(timer);
      status("Paused.");
    } else {
      status("It goes on.");
      ask();
    }
  });
  byId("which").addEventListener("submit", (event) => {
    event.preventDefault();
    say(byId("refused"), "");
    [wanted.filter, wanted.from] = [byId("filter").value.trim(), 0];
    ask();
  });
  byId("sort").addEventListener("change", () => {
    [wanted.sort, wanted.from] = [byId("sort").value, 0];
    ask();
  });
  const turn = (pages) => {
    wanted.from = Math.max(0, wanted.from + pages * wanted.length);
    ask();
  };
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  // Nobody looks: nothing is asked.
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !paused) ask();
  });
  draw();
  ask();
})();
