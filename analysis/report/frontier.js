// A point of the page of sweeps leads to the report of its run.
"use strict";
document.querySelectorAll(".chart").forEach((place) => {
  const follow = () => {
    if (!place.on) return void setTimeout(follow, 100); // it is drawn when it is looked at
    place.on("plotly_click", ({ points: [{ customdata }] }) => { if (customdata) location.href = encodeURI(customdata); });
  };
  follow();
});
