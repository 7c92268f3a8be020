(() => {
  "use strict"
  const { figures, templates } = JSON.parse(document.getElementById("data").textContent)
  const dark = matchMedia("(prefers-color-scheme: dark)")
  const still = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false }
  const plots = Object.entries(figures).map(([name, figure]) => [document.getElementById(`plot-${name}`), figure])
  const looks = (light) => templates[dark.matches && !light ? "dark" : "light"]

  // Dragging scrolls the page: there is nothing to zoom into that the numbers below a picture do not say.
  for (const [place, figure] of plots) {
    const layout = { ...figure.layout, template: looks(), dragmode: false, autosize: true }
    Plotly.newPlot(place, figure.data, layout, still)
  }
  dark.addEventListener("change", () => plots.forEach(([place]) => Plotly.relayout(place, { template: looks() })))

  // On paper there is light, one width, and nothing to click.
  const closed = []
  addEventListener("beforeprint", () => {
    closed.push(...document.querySelectorAll("details:not([open])"))
    closed.forEach((details) => (details.open = true))
    plots.forEach(([place]) => Plotly.relayout(place, { template: looks(true), width: 640 }))
  })
  addEventListener("afterprint", () => {
    closed.splice(0).forEach((details) => (details.open = false))
    plots.forEach(([place]) => Plotly.relayout(place, { template: looks(), width: null, autosize: true }))
  })
})()
