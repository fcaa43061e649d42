import { frame } from "./frame.js";

frame("charts");
