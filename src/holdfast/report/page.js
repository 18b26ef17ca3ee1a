// The values under the pointer. Everything else on the page works without this.
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart), card = svg.parentElement;
  const cursor = svg.querySelector(".cursor"), line = cursor.firstElementChild;
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  card.append(tip);
  const [left, right, top, bottom] = chart.plot, [low, high] = chart.x;
  const nearest = (points, x) => points.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const place = Math.min(right, Math.max(left, (event.clientX - box.left) * scale));
    const x = low + ((place - left) / (right - left || 1)) * (high - low);
    const lines = chart.lines.filter((l) => l.points.length), at = nearest(lines[0].points, x)[0];
    const drawn = high > low ? left + ((at - low) / (high - low)) * (right - left) : place;
    for (const [key, value] of [["x1", drawn], ["x2", drawn], ["y1", top], ["y2", bottom]]) line.setAttribute(key, value);
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(Object.assign(document.createElement("div"), { textContent: `iteration ${at.toLocaleString("en")}` }));
    for (const l of lines) {
      const point = nearest(l.points, x), row = document.createElement("div"), value = document.createElement("b");
      value.textContent = Number(point[1].toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
      row.append(`${l.name} `, value, chart.unit ? ` ${chart.unit}` : "");
      tip.append(row);
    }
    tip.hidden = false;
    const edge = card.getBoundingClientRect(), px = drawn / scale + box.left - edge.left;
    tip.style.left = `${px + tip.offsetWidth + 24 > edge.width ? px - tip.offsetWidth - 12 : px + 12}px`;
    tip.style.top = `${box.top - edge.top + top / scale + 8}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
}
