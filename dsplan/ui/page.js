// The address bar holds the question, and what Gradio and Spaces keep there.
window.dsplanAddress = (question) => {
  if (!question) return // what could not be read stays to be mended
  const kept = [...new URLSearchParams(location.search)].filter(([name]) => name.startsWith("__"))
  const others = new URLSearchParams(kept).toString()
  const query = [question, others].filter(Boolean).join("&")
  history.replaceState(null, "", `${location.pathname}?${query}`)
}

window.dsplanCopy = async () => {
  const button = document.getElementById("copy-link")
  const before = button.textContent
  try {
    await navigator.clipboard.writeText(location.href)
  } catch {
    // Only pages of this machine and of https have a clipboard.
    const field = Object.assign(document.createElement("textarea"), { value: location.href })
    document.body.append(field)
    field.select()
    document.execCommand("copy")
    field.remove()
    button.focus()
  }
  button.textContent = "Copied"
  setTimeout(() => (button.textContent = before), 2000)
}

// Gradio names every button of a choice apart, and arrow keys go through those of one name.
new MutationObserver(() => {
  for (const button of document.querySelectorAll("fieldset input[type=radio], .wrap input[type=radio]")) {
    const choice = button.closest("[id]:not(input)")
    if (choice && button.name !== choice.id) button.name = choice.id
  }
}).observe(document, { childList: true, subtree: true })

// A picture of a view that was hidden while the window changed still has its old width: plotly looks when it is told.
addEventListener("click", ({ target }) => {
  if (target instanceof Element && target.closest("[role=tab]")) {
    setTimeout(() => dispatchEvent(new Event("resize")), 50)
  }
})

// Files that are chosen or dropped are read here, and their texts are sent. What is cut is refused as too large.
window.dsplanFiles = ""
const MOST_BYTES = 2 ** 20
const check = async (files) => {
  const texts = {}
  let left = MOST_BYTES + 1
  for (const file of [...files].slice(0, 9)) {
    texts[file.name] = await file.slice(0, left).text()
    left = Math.max(left - file.size, 0)
  }
  window.dsplanFiles = JSON.stringify(texts)
  document.getElementById("check-files")?.click()
}
addEventListener("change", ({ target }) => {
  if (target instanceof Element && target.id === "trainer-files" && target.files.length) {
    check(target.files).then(() => (target.value = "")) // the same file may be chosen again when it has changed
  }
})
addEventListener("dragover", (event) => {
  if (event.dataTransfer?.types.includes("Files")) event.preventDefault()
})
addEventListener("drop", (event) => {
  if (!event.dataTransfer?.files.length) return
  event.preventDefault()
  check(event.dataTransfer.files)
})
