import { frame } from "./frame.js";

frame("prefixes");
