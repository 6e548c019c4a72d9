"""A script with the Trainer of transformers, as its examples are written."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    samples: int = field(default=256)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def make_data(samples):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 16, generator=draw)
    labels = (x @ torch.randn(16, 4, generator=draw)).argmax(dim=1)
    return [{"x": a, "labels": b} for a, b in zip(x, labels)]


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean().item()}


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    data = make_data(data_args.samples)
    trainer = Trainer(
        model=Classifier(),
        args=training_args,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
