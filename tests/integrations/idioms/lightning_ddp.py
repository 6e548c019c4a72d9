"""A script with Lightning's Trainer and its own DDP."""

import argparse
import json
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("eval_loss", nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output_dir", type=str, default=".")
    args = parser.parse_args()
    L.seed_everything(42)
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(256, 16, generator=draw)
    data = TensorDataset(x, (x @ torch.randn(16, 4, generator=draw)).argmax(dim=1))
    trainer = L.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        default_root_dir=args.output_dir,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LitClassifier()
    trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 64))
    if trainer.is_global_zero:
        with open(os.path.join(args.output_dir, "eval_results.json"), "w") as f:
            json.dump({"eval_loss": trainer.callback_metrics["eval_loss"].item()}, f)


if __name__ == "__main__":
    main()
