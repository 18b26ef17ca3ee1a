"""Fine-tune a converted BERT for text classification: finetune_bert.py HF_FOLDER DATA.tsv OUT (lines: label TAB text)."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder, data, out = sys.argv[1:4]
rows = [line.split("\t", 1) for line in Path(data).read_text(encoding="utf-8").splitlines()]
labels = torch.tensor([int(label) for label, _ in rows])
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer([text for _, text in rows], padding=True, truncation=True, max_length=32, return_tensors="pt")
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=int(labels.max()) + 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for _epoch in range(5):
    for batch in torch.randperm(len(rows)).split(8):
        loss = model(**{name: value[batch] for name, value in inputs.items()}, labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    right = (model(**inputs).logits.argmax(-1) == labels).float().mean()
print(f"loss {loss.item():.4f}, accuracy on the training data {right.item():.1%}")
model.save_pretrained(out)
tokenizer.save_pretrained(out)
