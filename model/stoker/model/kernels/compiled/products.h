/* The product that this processor has. Which one is decided when the kernels are compiled, for the machine itself. */
#pragma once
#include "bfloat16.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define TILE_PRODUCTS 1
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BW__)
#define VECTOR_PRODUCTS 1
#endif

/* y = x weight^T (+ bias, unless NULL). Return 0 without memory. */
int tile_product(const bf16 *x_TD, const bf16 *weight_ED, const bf16 *bias_E, bf16 *y_TE, long T, long D, long E);
int vector_product(const bf16 *x_TD, const bf16 *weight_ED, const bf16 *bias_E, bf16 *y_TE, long T, long D, long E);

/* Documented in products.c. Return 0 without memory. */
int stoker_product(const bf16 *x_TD, const bf16 *weight_ED, const bf16 *bias_E, bf16 *y_TE, long T, long D, long E);
int stoker_norm_product(const bf16 *x_TD, const bf16 *update_TD, const bf16 *norm_D, float eps, const bf16 *weight_ED,
                        const bf16 *bias_E, bf16 *total_TD, bf16 *y_TE, long T, long D, long E);
int stoker_norm_product_swiglu(const bf16 *x_TD, const bf16 *update_TD, const bf16 *norm_D, float eps,
                               const bf16 *weight_FD, bf16 *total_TD, bf16 *out_TF, long T, long D, long F);

/* Ask the kernel for the tiles' registers, once per process. Returns whether there are any. */
int may_use_tiles(void);
