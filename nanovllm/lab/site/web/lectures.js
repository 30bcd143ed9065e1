// What pages of lectures do: their players play, their predictions lock, and their animations can be stopped.
import { showFilm } from "../../course/labextensions/nanovllm-course/static/film.js";
import { mountStored, whenNear } from "./players.js";
import { mountPredictions } from "./predictions.js";
import PAGE_SHEET from "./lectures.css" with { type: "css" };

document.adoptedStyleSheets.push(PAGE_SHEET);
mountStored(document);
mountPredictions(document);
whenNear(document.querySelectorAll('img[src$=".gif"], img[src^="data:image/gif"]'), showFilm);
