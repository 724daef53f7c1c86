/* Kernels over rows that others call. */
#pragma once
#include "bfloat16.h"

void stoker_rms_norm(const bf16 *x_TD, const bf16 *weight_D, float eps, bf16 *out_TD, long T, long D);
void stoker_add_rms_norm(const bf16 *x_TD, const bf16 *residual_TD, const bf16 *weight_D, float eps, bf16 *out_TD,
                         bf16 *total_TD, long T, long D);
void stoker_swiglu(const bf16 *gate_up, bf16 *out_TF, long T, long F);
