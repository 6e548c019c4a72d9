"""Second moments of what a convolution's kernel sees: the A factor of a Conv2d.

A kernel of k x k taps sees at each output position one patch of k k C numbers, and the factor is
the sum over images and positions of patch patch^T. The patches are laid out (im2col), a few images
at a time, and multiplied, of which symmetry needs the upper triangle.

With stride 1 a CPU has less to do by *shifts*: the sum for taps (i, j) and (i', j') would depend on
the shift (i' - i, j' - j) alone, if it ran over all positions at which any tap touches the image.
So, for 3 x 3 taps,

1. sum over all of these, in one call for 15 shifts: 13 differ, up to symmetry. Sums of products of
   an image with itself, some way shifted, are what a convolution's weight gradient is, if the image
   is its input and its output's gradient at once;
2. take off again the positions in the frame around the output. There a kernel touches the image
   with some of its taps only, so these patches are short, and they are few.

Both give the moment's taps in the order (i, j, channel): a block of it belongs to one pair of taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_weight

from offbeat.kfac.factors import gram, pack

IntPair: TypeAlias = tuple[int, int]

MAX_LAID_OUT = 1 << 26
MAX_LAID_OUT_ON_HOST = 1 << 22
"""How many numbers of patches are in memory at a time, on a GPU and on a CPU; more where one image
has more.
"""

MAX_SUMMED = 4096
"""Positions summed in one call. Convolutions add them up one after the other, and lose precision as
sums grow.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """How a kernel moves over an image. Pairs are (vertical, horizontal).

    Attributes:
        taps: size of the kernel.
        stride, dilation: as in Conv2d, >= 1.
        before, after: zeros added on the top and left, and on the bottom and right.
    """

    taps: IntPair
    stride: IntPair = (1, 1)
    dilation: IntPair = (1, 1)
    before: IntPair = (0, 0)
    after: IntPair = (0, 0)

    @property
    def reach(self) -> IntPair:
        """Distance from the first to the last tap."""
        return (self.taps[0] - 1) * self.dilation[0], (self.taps[1] - 1) * self.dilation[1]

    def positions(self, size: IntPair) -> IntPair:
        """Output positions over an image of `size`."""
        vertical, horizontal = (
            max(-(-(size[a] + self.before[a] + self.after[a] - self.reach[a]) // self.stride[a]), 0)
            for a in (0, 1)
        )
        return vertical, horizontal


def patch_moment(
    images: torch.Tensor, window: Window, *, groups: int = 1, ones: bool = False
) -> tuple[torch.Tensor, int]:
    """The sum of patch patch^T, in the way that is cheapest on the device.

    Args:
        images: shape (N, C, H, W), float32 or float64.
        window: how the kernel moves.
        groups: of channels that the kernel does not mix.
        ones: each patch is followed by a 1, the input of a bias.

    Returns:
        The moment, shape (groups, d, d) with d = taps * C / groups (+ 1), of which only upper
        triangles are meant to be read, and how many patches were summed.
    """
    height, width = window.positions((images.shape[2], images.shape[3]))
    num_patches = images.shape[0] * height * width
    by_shifting = not images.is_cuda and _shifts_are_cheaper(images, window)
    way = by_shifts if by_shifting else by_patches
    return way(images, window, groups=groups, ones=ones), num_patches


def row_moments(images: torch.Tensor, window: Window, *, groups: int = 1) -> torch.Tensor:
    """As `patch_moment`, of each row of taps with itself alone, packed: shape (groups * rows of
    taps, d (d + 1) / 2) with d = taps in a row * C / groups.
    """
    height, _ = window.positions((images.shape[2], images.shape[3]))
    padded = F.pad(images, (0, 0, window.before[0], window.after[0]))
    of_row = Window(
        taps=(1, window.taps[1]),
        stride=(1, window.stride[1]),
        dilation=(1, window.dilation[1]),
        before=(0, window.before[1]),
        after=(0, window.after[1]),
    )
    moments = []
    for row in range(window.taps[0]):
        first = row * window.dilation[0]
        seen = padded[:, :, first : first + (height - 1) * window.stride[0] + 1 : window.stride[0]]
        moments.append(pack(patch_moment(seen, of_row, groups=groups)[0]))
    return torch.stack(moments, dim=1).flatten(0, 1)


def _shifts_are_cheaper(images: torch.Tensor, window: Window) -> bool:
    """Count products per channel pair and image."""
    height, width = images.shape[2], images.shape[3]
    taps, reach = window.taps, window.reach
    padded_by_more = any(
        side[a] > reach[a] for side in (window.before, window.after) for a in (0, 1)
    )
    if window.stride != (1, 1) or taps == (1, 1) or padded_by_more:
        return False
    rows, columns = window.positions((height, width))
    shifts = taps[0] * (2 * taps[1] - 1) * height * width
    frame_rows = sum(len(_touching(y, window, 0, height)) ** 2 for y in _frame(window, 0, rows))
    frame_columns = sum(
        len(_touching(x, window, 1, width)) ** 2 for x in _frame(window, 1, columns)
    )
    frame = frame_rows * taps[1] ** 2 * (width + reach[1]) + frame_columns * taps[0] ** 2 * rows
    num_taps = taps[0] * taps[1]
    return shifts + frame < num_taps * (num_taps + 1) // 2 * rows * columns


def by_patches(
    images: torch.Tensor, window: Window, *, groups: int = 1, ones: bool = False
) -> torch.Tensor:
    """`patch_moment` for any window, of patches in memory. The arguments are those of
    `patch_moment`, the result is its moment.
    """
    total, _ = _empty_moment(images, window, groups, ones)
    positions = window.positions((images.shape[2], images.shape[3]))
    if 0 in positions:
        return total
    per_image = max(images.shape[1] * torch.Size((*window.taps, *positions)).numel(), 1)
    most = MAX_LAID_OUT if images.is_cuda else MAX_LAID_OUT_ON_HOST
    for some in images.split(max(most // per_image, 1)):
        seen = _windows(some, window).unflatten(1, (groups, -1))
        # (groups, i j C, N rows columns): images are copied along their rows
        laid = seen.permute(1, 5, 6, 2, 0, 3, 4).flatten(4).flatten(1, 3)
        total += gram(laid.mT, ones=ones)
    return total


def _empty_moment(
    images: torch.Tensor, window: Window, groups: int, ones: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros of shape (groups, d, d), and a view of all but the ones as (groups, i, j, C, i', j',
    C).
    """
    shape = (*window.taps, images.shape[1] // groups)
    dim = torch.Size(shape).numel()
    total = images.new_zeros(groups, dim + ones, dim + ones)
    blocks: torch.Tensor = total[:, :dim, :dim].unflatten(2, shape).unflatten(1, shape)
    return total, blocks


def _write_ones_(total: torch.Tensor, images: torch.Tensor, window: Window) -> None:
    """Fill the last column of `total`, shape (groups, d + 1, d + 1), with sums over patches."""
    sums = _windows(images.sum(dim=0, keepdim=True), window).sum(dim=(0, 2, 3))
    rows, columns = window.positions((images.shape[2], images.shape[3]))
    total[:, :-1, -1] = sums.unflatten(0, (total.shape[0], -1)).permute(0, 2, 3, 1).flatten(1)
    total[:, -1, -1] = images.shape[0] * rows * columns


def _windows(images: torch.Tensor, window: Window) -> torch.Tensor:
    """A view of shape (N, C, rows, columns, taps, taps): what each tap sees at each position."""
    (top, left), (bottom, right) = window.before, window.after
    is_padded = top or left or bottom or right
    padded = F.pad(images, (left, right, top, bottom)) if is_padded else images
    seen = padded.unfold(2, window.reach[0] + 1, window.stride[0]).unfold(
        3, window.reach[1] + 1, window.stride[1]
    )
    return seen[..., :: window.dilation[0], :: window.dilation[1]]


def by_shifts(
    images: torch.Tensor, window: Window, *, groups: int = 1, ones: bool = False
) -> torch.Tensor:
    """`patch_moment` for stride 1 and padding within the kernel's reach, one shift at a time. The
    arguments are those of `patch_moment`, the result is its moment.
    """
    total, blocks = _empty_moment(images, window, groups, ones)
    _write_shifts_(blocks, images, window)
    _subtract_frame_(blocks, images, window)
    if ones:
        _write_ones_(total, images, window)
    return total


def _write_shifts_(blocks: torch.Tensor, images: torch.Tensor, window: Window) -> None:
    """Fill `blocks`, shape (groups, i, j, C, i', j', C), on and above the diagonal, as if no shift
    met a border.
    """
    taps, groups = window.taps, blocks.shape[0]
    # (groups, C, C, downs, rights) -> (groups, C, downs, rights, C)
    shifts = _shifted_products(images, window, groups).permute(0, 1, 3, 4, 2).contiguous()
    for i in range(taps[0]):
        for j in range(taps[1]):
            blocks[:, i, j, :, i:] = shifts[
                :, :, : taps[0] - i, taps[1] - 1 - j : 2 * taps[1] - 1 - j
            ]


def _shifted_products(images: torch.Tensor, window: Window, groups: int) -> torch.Tensor:
    """Sums over pixels of the image times itself, shifted: shape (groups, C, C, downs, rights).

    Shifts go down by 0, 1, ... taps, and to the left and the right.
    """
    taps, (height, width) = window.taps, window.reach
    padded = F.pad(images, (width, width, 0, height))
    shape = (images.shape[1], images.shape[1] // groups, taps[0], 2 * taps[1] - 1)
    products = images.new_zeros(shape)
    step = max(MAX_SUMMED // images.shape[2:].numel(), 1)
    for some, their in zip(padded.split(step), images.split(step), strict=True):
        products += conv2d_weight(some, shape, their, dilation=window.dilation, groups=groups)
    by_group: torch.Tensor = products.unflatten(0, (groups, -1))
    return by_group


def _subtract_frame_(blocks: torch.Tensor, images: torch.Tensor, window: Window) -> None:
    """Take off the positions outside of the output at which some tap still touches the image."""
    height, width = images.shape[2], images.shape[3]
    dilation, (top, left), bottom = window.dilation, window.before, window.after[0]
    rows, columns = window.positions((height, width))
    for y in _frame(window, 0, rows):
        taps = _touching(y, window, 0, height)
        if taps:
            first = y + taps[0] * dilation[0] - top
            strip = images[:, :, first : first + (len(taps) - 1) * dilation[0] + 1 : dilation[0]]
            seen = F.pad(strip, (window.reach[1], window.reach[1])).unfold(
                3, width + window.reach[1], dilation[1]
            )
            some = slice(taps.start, taps.stop)
            _subtract_gram_(blocks[:, some, :, :, some], seen)
    for x in _frame(window, 1, columns):
        taps = _touching(x, window, 1, width)
        if taps and rows:
            first = x + taps[0] * dilation[1] - left
            strip = images[:, :, :, first : first + (len(taps) - 1) * dilation[1] + 1 : dilation[1]]
            seen = F.pad(strip, (0, 0, top, bottom)).unfold(2, rows, dilation[0])
            some = slice(taps.start, taps.stop)
            _subtract_gram_(blocks[:, :, some, :, :, some], seen)


def _frame(window: Window, axis: int, positions: int) -> list[int]:
    """Positions before and after the output's, as far as taps reach."""
    before = window.reach[axis] - window.before[axis]
    after = window.reach[axis] - window.after[axis]
    return [*range(-before, 0), *range(positions, positions + after)]


def _touching(position: int, window: Window, axis: int, size: int) -> range:
    """Which taps, at `position` along `axis`, see the image and not the zeros around it."""
    place, dilation = position - window.before[axis], window.dilation[axis]
    first = max(0, -(place // dilation))
    stop = min(window.taps[axis], -(-(size - place) // dilation))
    return range(first, max(stop, first))


def _subtract_gram_(blocks: torch.Tensor, seen: torch.Tensor) -> None:
    """Take from `blocks`, shape (groups, i, j, C, i, j, C), the moment of `seen`, (N, channels, i,
    j, positions).
    """
    groups, per_group = blocks.shape[0], blocks.shape[3]
    grouped = seen.unflatten(1, (groups, per_group))
    laid = grouped.permute(1, 3, 4, 2, 0, 5).flatten(4).flatten(1, 3)
    blocks -= gram(laid.mT).view(blocks.shape)
