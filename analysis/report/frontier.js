// On the page of sweeps, a click on a point opens the report of its run.
"use strict";
document.querySelectorAll(".chart").forEach((container) => {
  const addClickHandler = () => {
    if (!container.on) return void setTimeout(addClickHandler, 100); // the chart is drawn only when it comes into view
    container.on("plotly_click", ({ points: [{ customdata }] }) => { if (customdata) location.href = encodeURI(customdata); });
  };
  addClickHandler();
});
