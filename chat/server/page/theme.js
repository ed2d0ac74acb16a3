// Runs before the first paint, so that a chosen theme does not flash.
"use strict";
try {
  const theme = localStorage.getItem("hybrid-memory.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* a browser that keeps nothing shows the system's theme */ }
