"""Which layers of a model K-FAC can precondition, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from offbeat.errors import ConfigError, nearest
from offbeat.kfac.blocks import EVERYTHING, SIDES, Block
from offbeat.kfac.layers import ConvBlock, EmbeddingBlock, LinearBlock
from offbeat.kfac.options import FactorOptions

SUPPORTED = (nn.Linear, nn.Conv2d, nn.Embedding, nn.MultiheadAttention)

PROJECTIONS = ("q", "k", "v")
"""In the order in which they lie in MultiheadAttention's packed weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was found.

    Attributes:
        blocks: in the order of the model's modules; the same on all ranks.
        plain: modules whose trainable parameters get plain gradients, each with the reason.
    """

    blocks: Sequence[Block]
    plain: dict[str, str]

    def notice(self) -> str | None:
        """One line that names what gets plain gradients; None where all is preconditioned."""
        if not self.plain:
            return None
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.plain.items():
            by_reason.setdefault(reason, []).append(name)
        return "plain gradients for " + "; ".join(
            f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()
        )


def survey(model: nn.Module, options: FactorOptions) -> Survey:
    """Find the blocks of `model`.

    Raises:
        ConfigError: nothing in it can be preconditioned, or `options` names a module that is none.
    """
    _check_names(model, options)
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    blocks: list[Block] = []
    plain: dict[str, str] = {}
    # Torch's decoder layers attend to the encoder's output, so query and key differ there.
    decoded = {
        id(layer.multihead_attn)
        for layer in model.modules()
        if isinstance(layer, nn.TransformerDecoderLayer)
    }
    claimed: set[int] = set()
    for name, module in model.named_modules():
        own = [
            parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad
        ]
        if id(module) in claimed or not (own or isinstance(module, nn.MultiheadAttention)):
            continue
        reason = _objection(module)
        if reason is None and any(holders[id(parameter)] > 1 for parameter in own):
            reason = "shares a parameter with another module"
        if reason is None:
            is_cross = id(module) in decoded or name in options.cross_attention
            found = list(_blocks_of(name, module, options, is_cross=is_cross))
            fitting = [block for block in found if _largest(block) <= options.max_dim]
            blocks += fitting
            plain |= {
                block.name: f"a factor of more than {options.max_dim} rows"
                for block in found
                if block not in fitting
            }
            plain |= _left_over(name, module, found)
            if isinstance(module, nn.MultiheadAttention):
                # The attention uses the weight of its output projection without calling the module,
                # so the projection is one of the attention's blocks and not a Linear of its own.
                claimed.add(id(module.out_proj))
        elif any(module.children()) and not isinstance(module, SUPPORTED):
            own_names = [
                own
                for own, parameter in module.named_parameters(recurse=False)
                if parameter.requires_grad
            ]
            plain |= {
                f"{name}.{own}".removeprefix("."): "a parameter outside of layers"
                for own in own_names
            }
        else:
            plain[name or type(module).__name__] = reason
    if not blocks:
        raise ConfigError(
            "K-FAC finds no layer that it can precondition: a Linear, Conv2d, Embedding or"
            " MultiheadAttention that is trainable and not overridden"
            f" ({Survey(blocks=(), plain=plain).notice() or 'no parameter is trainable'}); use a"
            " strategy for plain gradients"
        )
    return Survey(blocks=blocks, plain=plain)


def _check_names(model: nn.Module, options: FactorOptions) -> None:
    attentions = [
        name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    ]
    for name in options.cross_attention:
        if name not in attentions:
            raise ConfigError(
                f"cross_attention names {name!r}, which is no MultiheadAttention of the"
                f" model{nearest(name, attentions)}; there is {', '.join(attentions) or 'none'}"
            )


def _objection(module: nn.Module) -> str | None:
    """Why `module` cannot be preconditioned; None if it can."""
    kind = next((kind for kind in SUPPORTED if isinstance(module, kind)), None)
    if kind is None:
        return f"{type(module).__name__} is not supported"
    if type(module).forward is not kind.forward:
        return f"{type(module).__name__} overrides {kind.__name__}.forward"
    if kind is nn.MultiheadAttention:
        return None
    if isinstance(module, nn.Embedding) and (module.sparse or module.scale_grad_by_freq):
        return "its gradient is sparse or scaled by frequency"
    weight = _own_parameter(module, "weight")
    if weight is None:
        return "its weight is computed from other parameters"
    return None if weight.requires_grad else "only its bias is trained"


def _largest(block: Block) -> int:
    return max(0 if (shape := block.shape(side)).is_diagonal else shape.dim for side in SIDES)


def _left_over(name: str, module: nn.Module, found: Sequence[Block]) -> dict[str, str]:
    """Parameters of a supported module that no block covers, such as attention's `bias_k`."""
    covered = {id(parameter) for block in found for parameter in (block.weight, block.bias)}
    return {
        f"{name}.{own}".removeprefix("."): "no weight or bias of a trained projection"
        for own, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in covered
    }


def _blocks_of(
    name: str, module: nn.Module, options: FactorOptions, *, is_cross: bool
) -> Iterator[Block]:
    if isinstance(module, nn.Linear):
        yield LinearBlock(
            name, module, options, bias_name=_trained(module, "bias"), batch_dim=options.batch_dim
        )
    elif isinstance(module, nn.Conv2d):
        yield ConvBlock(name, module, bias_name=_trained(module, "bias"))
    elif isinstance(module, nn.Embedding):
        yield EmbeddingBlock(name, module, options)
    elif isinstance(module, nn.MultiheadAttention):
        yield from _attention_blocks(name, module, options, is_cross=is_cross)


def _attention_blocks(
    name: str, module: nn.MultiheadAttention, options: FactorOptions, *, is_cross: bool
) -> Iterator[Block]:
    """Self-attention's three projections share an A; others have one each. Then the output
    projection.
    """
    prefix = f"{name}." if name else ""
    bias, packed = _trained(module, "in_proj_bias"), _trained(module, "in_proj_weight")
    if packed is not None and not is_cross:
        num = len(PROJECTIONS)
        yield LinearBlock(
            f"{prefix}in_proj",
            module,
            options,
            weight_name=packed,
            bias_name=bias,
            batch_dim=1,
            groups=num,
        )
    else:
        for position, which in enumerate(PROJECTIONS):
            weight_name = packed or _trained(module, f"{which}_proj_weight")
            places = slice(position * module.embed_dim, (position + 1) * module.embed_dim)
            if weight_name is not None:
                yield LinearBlock(
                    f"{prefix}{which}_proj",
                    module,
                    options,
                    weight_name=weight_name,
                    bias_name=bias,
                    rows=EVERYTHING if packed is None else places,
                    bias_rows=places,
                    batch_dim=1,
                )
    out = module.out_proj
    if _trained(out, "weight") is not None:
        yield LinearBlock(
            f"{prefix}out_proj", out, options, bias_name=_trained(out, "bias"), batch_dim=1
        )


def _own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of `module` itself; None where a parametrization computes it from others."""
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return dict(own).get(name)


def _trained(module: nn.Module, name: str) -> str | None:
    parameter = _own_parameter(module, name)
    return name if parameter is not None and parameter.requires_grad else None
