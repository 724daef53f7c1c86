/* Kernels over rows that others call. */
#pragma once
#include "bfloat16.h"

void stoker_rms_norm(const bf16 *x_TD, const bf16 *weight_D, float eps, bf16 *out_TD, long T, long D);
void stoker_add_rms_norm(const bf16 *x_TD, const bf16 *residual_TD, const bf16 *weight_D, float eps, bf16 *out_TD,
                         bf16 *total_TD, long T, long D);
void stoker_swiglu(const bf16 *gate_up, bf16 *out_TF, long T, long F);
void stoker_rotate_and_write(const bf16 *q, const bf16 *k, const bf16 *v, long token_stride, const float *cos,
                             const float *sin, long table_stride, const bf16 *q_norm, const bf16 *k_norm, float eps,
                             bf16 *out_TNH, bf16 *cache, const int64_t *rows, long T, long N, long K, long H);
void stoker_attend(const bf16 *q_TNH, bf16 *out_TNH, const bf16 *cache, const int64_t *token_rows,
                   const int64_t *blocks, const int64_t *lengths, long S, long B, long block_size, long N, long K,
                   long H, float scale, long window);
/* Needs vector products and H a multiple of 16. */
void stoker_attend_prompt(const bf16 *q_TNH, bf16 *out_TNH, const bf16 *cache, const int64_t *blocks, long T, long L,
                          long B, long block_size, long N, long K, long H, float scale, long window);
