"""Train in mixed precision with PyTorch, and clip at the right place with a GradScaler.

A scaler multiplies the loss so that small float16 gradients do not vanish. unscale_() divides the gradients again. The
threshold is for unscaled gradients, so clip after unscale_().
"""

import torch

import gradclip

MAX_NORM = 1.0


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
    inputs = torch.randn(64, 8).to(device)
    targets = 0.5 + inputs[:, :2].sum(dim=1, keepdim=True)
    skipped = 0
    for step in range(1, 9):
        optimizer.zero_grad()
        with torch.amp.autocast(device, dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scale = scaler.get_scale()
        # At first some gradients exceed 1. Multiplied by 65,536 they overflow: float16 ends at 65,504.
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        # unscale_() has already looked for infinities and NaN. If it found any, step() skips the optimizer, whatever
        # clipping does. Keep the default nonfinite="propagate": the returned norm then shows the overflow. Without
        # unscale_(), the scaler would look only in step(), after clipping. "zero" or "drop" would then hide the
        # overflow, and the scale would never decrease.
        norm = gradclip.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        overflowed = scaler.get_scale() < scale
        skipped += overflowed
        did = "skipped, scale halved" if overflowed else "taken"
        print(f"step {step}: scale {scale:g}, loss {loss:.3f}, gradient norm {norm:.2f}, {did}")
    finite = all(parameter.isfinite().all() for parameter in model.parameters())
    print(f"{skipped} of 8 steps skipped; parameters {'all finite' if finite else 'NOT FINITE'}")


if __name__ == "__main__":
    main()
