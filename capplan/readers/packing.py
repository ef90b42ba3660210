"""Logical parameters behind stored tensors: packed words unpacked, scales left out.

A 4-bit weight sits eight to an int32 (AWQ, GPTQ, compressed-tensors) or two to a byte (NVFP4,
MXFP4, bitsandbytes); counting the words as parameters is wrong by that factor. How many weights a
word holds is told, in this order, by the shapes of the tensors stored beside it, then by the
checkpoint's own quantization_config; where neither tells, it is an error, never a guess.

"Parameter" is what transformers calls one: persistent buffers (inverse frequencies, position ids,
the router's e_score_correction_bias, batch statistics) are stored but not counted. Tied weights
count as often as they are stored.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.stored_tensor import StoredTensor

_COMPANIONS: Final = frozenset(
    "weight_shape weight_g_idx g_idx qzeros weight_zero_point input_zero_point output_zero_point "
    "k_scale v_scale q_scale kv_scale prob_scale output_scale pre_quant_scale act_scale "
    "absmax nested_absmax quant_map nested_quant_map SCB weight_format".split()
)
_COMPANION_ENDS: Final = (
    "weight_scale",
    "weight_scale_2",
    "scale_inv",
    "input_scale",
    "global_scale",
)
_BUFFERS: Final = frozenset(
    "position_ids token_type_ids masked_bias e_score_correction_bias expert_bias tid2eid "
    "num_batches_tracked running_mean running_var relative_position_index layer_scalar embed_scale "
    "std_bias std_scale input_min input_max output_min output_max".split()
)
# GGUF puts ".weight" or ".bias" behind these.
_BUFFER_OWNERS: Final = frozenset(
    "rope_freqs rope_factors_long rope_factors_short attn_rot_embd exp_probs_b layer_output_scale "
    "ffn_gate_tid2eid".split()
)
_WIDE: Final = frozenset("F64 F32 F16 BF16 C64".split())
_INTEGERS: Final = frozenset("U8 I8 U16 I16 U32 I32 U64 I64".split())
_WORD_BITS: Final = 32
_WIDTHS: Final = (2, 3, 4, 8)
# Scales of this type are one for so many weights: OCP MX formats (e8m0, also kept as uint8), NVFP4.
_BLOCK_OF_SCALE: Final = {"F8_E8M0": 32, "U8": 32, "F8_E4M3": 16}
_HINT: Final = (
    "give the quantization_config of the checkpoint's config.json; "
    "without a match there this format is not supported"
)


def logical_parameters(
    tensors: Sequence[StoredTensor],
    *,
    where: str,
    quantization_config: Mapping[str, object] | None = None,
) -> tuple[int, ...]:
    """Parameters each tensor holds, in the order given; 0 for companions and buffers.

    Errors: InputError naming the first tensor whose packing neither its neighbours' shapes nor
    `quantization_config` tell.
    """
    others = {tensor.name: tensor for tensor in tensors}
    config = quantization_config or {}
    return tuple(_Packed(tensor, others, where, config).parameters() for tensor in tensors)


class _Packed:
    """One tensor with the ones stored beside it."""

    __slots__ = ("config", "leaf", "others", "path", "tensor", "where")

    def __init__(
        self,
        tensor: StoredTensor,
        others: Mapping[str, StoredTensor],
        where: str,
        config: Mapping[str, object],
    ) -> None:
        self.tensor = tensor
        self.others = others
        self.where = where
        self.config = config
        self.path, _, self.leaf = tensor.name.rpartition(".")

    def parameters(self) -> int:
        """Logical parameters of the tensor; 0 for a companion or a buffer."""
        tensor, leaf, dtype = self.tensor, self.leaf, self.tensor.dtype
        if self._is_companion() or self._is_buffer():
            return 0
        if dtype not in _INTEGERS:
            return tensor.elements
        if leaf == "qweight" and dtype == "I32":
            return self._words_beside_scales()
        if leaf == "weight_packed" and dtype == "I32":
            return self._compressed_words()
        scales = self._beside("scales")
        if leaf == "weight" and dtype == "U32" and scales is not None:
            # MLX: out × in·bits/32 words, scales out × in/group.
            return tensor.elements * _WORD_BITS // self._configured_bits(-1, scales)
        if dtype in ("U8", "I8"):
            return self._bytes()
        raise self._unknown("is of an integer type that no known format uses here")

    def _beside(self, leaf: str) -> StoredTensor | None:
        """The tensor of that last segment in the same module."""
        return self.others.get(f"{self.path}.{leaf}" if self.path else leaf)

    def _is_companion(self) -> bool:
        leaf = self.leaf
        if leaf in ("weight", "bias"):  # the usual case, first
            return False
        # e8m0 is a power of two without sign or mantissa: it can only scale something.
        if (
            self.tensor.dtype == "F8_E8M0"
            or leaf in _COMPANIONS
            or leaf.endswith(_COMPANION_ENDS)
            or leaf.startswith("bitsandbytes__")
        ):
            return True
        # These are also ordinary parameters' names (a norm's "scale"), so the weight decides.
        if leaf == "scale":
            weight = self._beside("weight")
            return weight is not None and weight.dtype not in _WIDE
        if leaf in ("scales", "biases"):
            weight = self._beside("qweight") or self._beside("weight")
            return weight is not None and weight.dtype in ("I32", "U32")
        return leaf.endswith("_scales") and self._beside(leaf[:-7] + "_blocks") is not None

    def _is_buffer(self) -> bool:
        leaf, tensor = self.leaf, self.tensor
        if (
            leaf in _BUFFERS
            or leaf.endswith("inv_freq")
            or tensor.dtype == "BOOL"
            or self.path.rpartition(".")[2] in _BUFFER_OWNERS
        ):
            return True
        # GPT-2 and its kin save their causal mask as "attn.bias", 1 × 1 × context × context.
        shape = tensor.shape
        return leaf == "bias" and len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]

    def _words_beside_scales(self) -> int:
        """AWQ (in × out/8) or GPTQ (in·bits/32 × out) words; scales are groups × out in both."""
        tensor, scales = self.tensor, self._beside("scales")
        if scales is None or len(tensor.shape) != 2 or len(scales.shape) != 2:
            raise self._unknown("has no scales of two dimensions beside it")
        rows, columns = tensor.shape
        groups, out = scales.shape
        if not (rows and columns and groups and out):
            raise self._unknown("or its scales are empty")
        if columns != out:  # AWQ
            packed, left = divmod(out, columns)
            if left or packed not in (4, 8, 16) or rows % groups:
                raise self._unknown(f"does not fit its scales {list(scales.shape)}")
            return rows * out
        g_idx, qzeros = self._beside("g_idx"), self._beside("qzeros")
        widths = set()
        if g_idx is not None and g_idx.elements:
            bits, left = divmod(_WORD_BITS * rows, g_idx.elements)
            widths.add(0 if left else bits)
        if qzeros is not None and len(qzeros.shape) == 2:
            bits, left = divmod(_WORD_BITS * qzeros.shape[1], out)
            widths.add(0 if left else bits)
        if not widths:
            widths.add(self._configured_bits(0, scales))
        if len(widths) > 1 or not widths <= set(_WIDTHS):
            raise self._unknown("disagrees with the shapes of its g_idx and qzeros")
        return rows * _WORD_BITS * out // widths.pop()

    def _compressed_words(self) -> int:
        """compressed-tensors pack-quantized: out × in·bits/32 words, zero points packed along
        out."""
        tensor = self.tensor
        if len(tensor.shape) != 2 or not tensor.elements:
            raise self._unknown("is not a matrix of packed words")
        out, words = tensor.shape
        g_idx, zeros = self._beside("weight_g_idx"), self._beside("weight_zero_point")
        if g_idx is not None and g_idx.elements:
            packed, left = divmod(g_idx.elements, words)
        elif zeros is not None and zeros.dtype == "I32" and zeros.elements:
            packed, left = divmod(out, zeros.shape[0])
        else:
            bits = self._configured_bits(-1, self._beside("weight_scale"))
            packed, left = _WORD_BITS // bits, 0
        if left or packed not in (4, 8, 16):
            raise self._unknown("disagrees with the shape of its weight_g_idx or weight_zero_point")
        return tensor.elements * packed

    def _bytes(self) -> int:
        """Weights of eight bits, or of four in pairs: told by the kind and number of scales."""
        tensor, leaf, count = self.tensor, self.leaf, self.tensor.elements
        if tensor.name + ".absmax" in self.others:
            return 2 * count  # bitsandbytes nf4 and fp4
        if tensor.dtype == "I8" and self._beside("SCB") is not None:
            return count  # bitsandbytes LLM.int8
        if leaf.endswith("_blocks"):
            names: tuple[str, ...] = (leaf[:-7] + "_scales",)
        elif leaf in ("weight", "weight_packed"):
            names = ("weight_scale", "weight_scale_inv", "scale")
        else:
            names = (f"{leaf}_weight_scale", f"{leaf}_scale_inv", f"{leaf}_scale")
        scale = next((found for name in names if (found := self._beside(name))), None)
        if scale is None or not scale.elements:
            raise self._unknown("has no scales beside it that tell what it is")
        if scale.dtype in _WIDE:
            return self._bytes_with_wide_scale(scale)
        share, left = divmod(count, scale.elements)
        block = _BLOCK_OF_SCALE.get(scale.dtype, 0)
        if not left and share * 2 == block:
            return 2 * count
        if not left and share == block == 32:
            return count
        raise self._unknown(f"does not fit its scales {scale.dtype} {list(scale.shape)}")

    def _bytes_with_wide_scale(self, scale: StoredTensor) -> int:
        """INT8, BitNet (four ternary weights a byte) or modelopt's W4 AWQ (out/2 × in)."""
        tensor, method = self.tensor, self.config.get("quant_method")
        rows = tensor.shape[0] if tensor.shape else 1
        if tensor.dtype == "I8" and (
            scale.elements in (1, rows)
            or scale.name.endswith("weight_scale_inv")
            or method == "compressed-tensors"  # never packs into int8
        ):
            return tensor.elements
        if tensor.dtype == "U8" and method == "bitnet":
            return 4 * tensor.elements
        if (
            tensor.dtype == "U8"
            and len(tensor.shape) == len(scale.shape) == 2
            and rows * 2 == scale.shape[0]
            and tensor.shape[1] % scale.shape[1] == 0
        ):
            return 2 * tensor.elements
        raise self._unknown(f"does not fit its scales {scale.dtype} {list(scale.shape)}")

    def _configured_bits(self, axis: int, scales: StoredTensor | None) -> int:
        """The one width of quantization_config that fits these words and their scales along
        `axis`."""
        words = self.tensor.shape[axis] if self.tensor.shape else 1
        groups = scales.shape[axis] if scales is not None and scales.shape else None
        fitting = set()
        for bits, group in self._configured():
            inputs = words * _WORD_BITS // bits
            expected = -(-inputs // group) if group else 1
            if groups is None or groups == expected:
                fitting.add(bits)
        if len(fitting) != 1:
            raise self._unknown("holds packed weights and nothing stored beside it tells how many")
        return fitting.pop()

    def _configured(self) -> set[tuple[int, int | None]]:
        """(bits, group size or None) that the config gives to this module, else to any."""
        own = self.config.get(self.path)
        if isinstance(own, Mapping):  # MLX writes overrides under the module's path
            return {self._pair(own)}
        groups = self.config.get("config_groups")
        if not isinstance(groups, Mapping):
            return {self._pair(self.config)} if _bits_key(self.config) else set()
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        return {self._pair(each) for each in weights if isinstance(each, Mapping) and each}

    def _pair(self, config: Mapping[str, object]) -> tuple[int, int | None]:
        key = _bits_key(config) or "bits"
        bits, group = config.get(key), config.get("group_size")
        if type(bits) is not int or bits not in _WIDTHS:
            raise InputError(
                f"quantization_config: {key} is {shown(bits)}",
                where=self.where,
                hint=f"weight widths understood are {', '.join(map(str, _WIDTHS))}",
            )
        return bits, group if type(group) is int and group > 0 else None

    def _unknown(self, problem: str) -> InputError:
        tensor = self.tensor
        return InputError(
            f"tensor {shown(tensor.name)} ({tensor.dtype} {list(tensor.shape)}) {problem}",
            where=self.where,
            hint=_HINT,
        )


def _bits_key(config: Mapping[str, object]) -> str | None:
    return next((key for key in ("bits", "num_bits", "w_bit") if key in config), None)
