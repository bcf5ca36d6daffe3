const tip = document.getElementById("tip");
for (const title of document.querySelectorAll(".plot title")) { title.parentNode.dataset.tip = title.textContent; title.remove(); }
document.addEventListener("pointermove", ({ target, clientX, clientY }) => {
  const text = target.dataset?.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.max(8, Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(8, clientY - tip.offsetHeight - 12) + "px";
});
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
