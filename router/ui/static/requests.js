import { frame } from "./frame.js";

frame("requests");
