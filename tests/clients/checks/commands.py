"""Commands of clients that measure servers: each is one check, which passes if it ends well and says what it should."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from reporting import MODEL, URL, check, run

CLIENT, TOKENIZER = sys.argv[3], sys.argv[4]
BIN = Path(sys.executable).parent
COMMANDS = {
    "aiperf": [
        str(BIN / "aiperf"),
        *(
            "profile",
            "--model",
            MODEL,
            "--url",
            URL,
            "--endpoint-type",
            "chat",
            "--streaming",
            "--tokenizer",
            TOKENIZER,
        ),
        *("--synthetic-input-tokens-mean", "50", "--output-tokens-mean", "20", "--request-count", "8"),
        *("--concurrency", "2", "--ui", "simple"),
    ],
    "guidellm": [
        *(str(BIN / "guidellm"), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL}", "--profile", "kind=synchronous"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--constraint", "kind=max_requests,count=4"),
        *("--data", "kind=synthetic_text,prompt_tokens=50,output_tokens=20", "--output", "kind=console"),
    ],
    "lm-eval": [
        str(BIN / "lm_eval"),
        *("--model", "local-completions", "--tasks", "capitals", "--include_path", "."),
        "--model_args",
        f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,tokenizer={TOKENIZER},tokenized_requests=False",
    ],
}


for file in Path(__file__).parent.glob("capitals.*"):  # the task names its data relative to the working folder
    shutil.copy(file, file.name)


@check("a loglikelihood task" if CLIENT == "lm-eval" else "a short run")
def _() -> None:
    ended = subprocess.run(COMMANDS[CLIENT], capture_output=True, text=True, timeout=240, check=False)
    said = (ended.stdout + ended.stderr).strip().splitlines()
    assert ended.returncode == 0, f"exit code {ended.returncode}: {' | '.join(said[-3:])}"


run()
