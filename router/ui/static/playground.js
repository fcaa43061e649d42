// The chat playground.

import { frame } from "./frame.js";

frame("playground");
