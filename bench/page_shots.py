"""Pictures of the page for the docs: a toy model that has learned two texts by heart, in headless Chromium.

python bench/page_shots.py [docs/img]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from serve_common import serve
from slipstream.testing.tiny import save_tiny, tiny_model, tiny_tokenizer

QUESTION = "How does it work?"
ANSWER = (
    "A small drafter guesses the next few tokens. The large model checks all of the guesses in one pass,"
    " keeps the ones it would have said itself, and adds one token of its own. The words are the words of the"
    " large model; only the waiting is shorter. When the guesses are wrong, one pass still gives one token."
    " When the guesses are right, one pass gives many tokens."
)
OTHER = ("What is it good for?", "It is good for text that repeats: code, tables, quotes, and the like.")


def learned(path: Path) -> Path:
    """A model of two layers, trained until it answers by heart."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("qwen2", hidden=128, seed=0, initializer_range=0.05, max_position_embeddings=2048)
    texts = []
    for question, answer in ((QUESTION, ANSWER), OTHER):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        texts.append(torch.tensor([tokenizer(f"{prompt}{answer}{tokenizer.eos_token}")["input_ids"]]))
    model.train()
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(600):
        loss = model(input_ids=texts[step % 2], labels=texts[step % 2]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > 50 and float(loss.detach()) < 0.002:
            break
    model.eval()
    model.requires_grad_(False)
    return save_tiny(path, model=model, tokenizer=tokenizer)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img")
    folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        model = learned(Path(work) / "by-heart")
        drafter = "ngram:branches=2,num_speculative_tokens=6"
        with serve(str(model), "--drafter", drafter, log=Path("bench/out/page_shots.log")) as served:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
                page.goto(served.url)
                page.wait_for_selector("#state:text-is('ready')")
                page.fill("#temperature", "0")
                page.fill("#tokens", "500")
                if scheme == "dark":
                    page.check("#compare")
                page.fill("#prompt", QUESTION)
                page.press("#prompt", "Enter")
                page.wait_for_selector("#send:not([disabled])")
                spans = page.locator(".text .drafted")
                spans.nth(spans.count() // 2).hover()
                page.screenshot(path=folder / f"serve-{scheme}.png")
            browser.close()


if __name__ == "__main__":
    main()
