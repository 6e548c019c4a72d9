"""A loop with Accelerate, as its examples are written: accumulation, clipping, gathered metrics."""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(256, 16, generator=draw)
    y = (x @ torch.randn(16, 4, generator=draw)).argmax(dim=1)
    data = TensorDataset(x, y)
    return (
        DataLoader(data, shuffle=True, batch_size=batch_size),
        DataLoader(data, shuffle=False, batch_size=64),
    )


def training_function(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(8)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = model.to(accelerator.device)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 100)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for x, y in eval_dataloader:
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(x), y, reduction="none")
            losses.append(accelerator.gather_for_metrics(loss))
        eval_loss = torch.cat(losses).mean().item()
        accelerator.print(f"epoch {epoch}: {eval_loss:.4f}")
    accelerator.wait_for_everyone()
    accelerator.save_model(accelerator.unwrap_model(model), args.output_dir)
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "eval_results.json"), "w") as f:
            json.dump({"eval_loss": eval_loss}, f)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output_dir", type=str, default=".")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
