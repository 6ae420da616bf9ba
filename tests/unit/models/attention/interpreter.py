"""FlashInfer's paged prefill in plain PyTorch: the same class, arguments and arrays, read element by element.

It stands in for the package where there is no CUDA device, and computes what FlashInfer 0.6.4's kernels do;
`test_flashinfer` holds its signatures against the real class where that is installed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD"
        assert backend == "fa2"
        assert float_workspace_buffer.dtype == torch.uint8
        self.captured = use_cuda_graph
        self.plans = 0
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._custom_mask_buf = custom_mask_buf
        self._mask_indptr_buf = mask_indptr_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        arrays = {
            "_qo_indptr_buf": qo_indptr,
            "_paged_kv_indptr_buf": paged_kv_indptr,
            "_paged_kv_indices_buf": paged_kv_indices,
            "_paged_kv_last_page_len_buf": paged_kv_last_page_len,
        }
        assert all(array.dtype == torch.int32 for array in arrays.values())
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        keys = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert seq_lens is not None
        assert seq_lens.tolist() == keys.tolist()
        if self.captured:
            assert len(qo_indptr) == len(self._qo_indptr_buf), "the batch of a captured plan is fixed"
            for name, array in arrays.items():
                getattr(self, name)[: len(array)].copy_(array)
        else:
            self._custom_mask_buf = self._mask_indptr_buf = None
            for name, array in arrays.items():
                setattr(self, name, array)
        self.heads, self.shape = num_qo_heads, (page_size, num_kv_heads, head_dim_qk)
        self.dtypes = (q_data_type, kv_data_type)
        self.causal, self.window_left = causal, window_left
        self.scale = sm_scale if sm_scale is not None else head_dim_qk**-0.5
        self.soft_cap = logits_soft_cap or 0.0
        self.plans += 1

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == self.shape
        assert (q.dtype, keys.dtype) == self.dtypes
        assert q.shape[1] == self.heads
        out = torch.zeros_like(q) if out is None else out
        lse = torch.full(q.shape[:2], -math.inf)
        # A kernel: no mode of PyTorch's sees into it.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._attend(q, keys, values, out, lse)
        return (out, lse) if return_lse else out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor) -> None:
        assert q.shape[0] == int(self._qo_indptr_buf[-1])
        for i in range(len(self._qo_indptr_buf) - 1):
            rows = slice(int(self._qo_indptr_buf[i]), int(self._qo_indptr_buf[i + 1]))
            pages = self._paged_kv_indices_buf[
                int(self._paged_kv_indptr_buf[i]) : int(self._paged_kv_indptr_buf[i + 1])
            ]
            count = (len(pages) - 1) * self.shape[0] + int(self._paged_kv_last_page_len_buf[i]) if len(pages) else 0
            # What lies behind the last key is never read.
            k, v = (
                t[pages].flatten(0, 1)[:count].repeat_interleave(self.heads // t.shape[2], 1) for t in (keys, values)
            )
            scores = torch.einsum("qhd,khd->qhk", q[rows].float(), k.float()) * self.scale
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            scores = scores.masked_fill(~self._mask(i, scores.shape[0], count)[:, None], -math.inf)
            sums = scores.logsumexp(-1) if count else scores.new_full(scores.shape[:2], -math.inf)
            weights = (scores - sums[..., None]).exp().nan_to_num()
            out[rows] = torch.einsum("qhk,khd->qhd", weights, v.float()).to(q.dtype)
            lse[rows] = sums / math.log(2)

    def _mask(self, request: int, rows: int, keys: int) -> Tensor:
        row, key = torch.arange(rows)[:, None], torch.arange(keys)[None]
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if self._custom_mask_buf is not None:
            bit = row * keys + key
            byte = self._custom_mask_buf[int(self._mask_indptr_buf[request]) + bit // 8].int()
            seen = (byte >> (bit % 8) & 1).bool()
        elif self.causal:
            seen = key <= keys - rows + row
        if self.window_left >= 0:
            seen = seen & (key + rows + self.window_left >= keys + row)
        return seen


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """One attention over the keys of both: sums of base 2."""
    whole = torch.logaddexp2(s, s_other)
    merged = v.float() * (s - whole).exp2()[..., None] + v_other.float() * (s_other - whole).exp2()[..., None]
    v.copy_(merged)
    s.copy_(whole)
