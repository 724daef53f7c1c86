/* Products of bfloat16 rows with a weight as it is stored, on processors with AVX2 and FMA but without AVX-512, where
 * neither oneDNN nor torch has fast ones.
 *
 * The contract of a result: one float sum in eight lanes, over chunks of 16 numbers in rising order, the even numbers of
 * a chunk before the odd ones, each step a fused multiply-add; then ((0+1)+(2+3)) + ((4+5)+(6+7)) of the lanes, plus the
 * bias, rounded once. It does not depend on the other rows, on the tile or on the number of threads.
 *
 * T rows, D input size (a multiple of 16), E output size. x is widened once, each chunk's even numbers before its odd
 * ones, because 16 numbers of a weight become two vectors by a shift and a mask.
 */
#include "products.h"

#if VECTOR_PRODUCTS
#include <immintrin.h>
#include <omp.h>
#include <stdlib.h>

#define CHUNK 16
#define PANEL_BYTES 98304 /* of the weight: stays in the second-level cache while all rows of x pass */
#define MOST_PANEL 64     /* rows of the weight in a panel */
#define MOST_ROWS 64      /* rows of x for which a panel's sums are kept */
#define SERIAL_WEIGHT 65536

/* x in float, each chunk as [8 even, 8 odd]. */
static void widen_rows(const bf16 *x, float *wide_x, long count)
{
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
    for (long i = 0; i < count; i += CHUNK) {
        __m256i chunk = _mm256_loadu_si256((const __m256i *)(x + i));
        _mm256_storeu_ps(wide_x + i, _mm256_castsi256_ps(_mm256_slli_epi32(chunk, 16)));
        _mm256_storeu_ps(wide_x + i + 8, _mm256_castsi256_ps(_mm256_and_si256(chunk, odd)));
    }
}

/* Add the lanes of four sums. */
static inline __attribute__((always_inline)) __m128 add_lanes(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* sums[t * MOST_PANEL + r] = weight row r times x row t, of R rows of the weight and C rows of x. The next R rows are
 * fetched meanwhile, in the order of the memory, which one stream per row would not have. */
static inline __attribute__((always_inline)) void tile(const bf16 *weight, const float *x, float *sums, long D, int R,
                                                       int C, int fetches)
{
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000);
    __m256 sum[12];
    for (int i = 0; i < 12; i++)
        sum[i] = _mm256_setzero_ps();
    for (long d = 0; d < D; d += CHUNK) {
        if (fetches && d % 32 == 0)
            for (int r = 0; r < R; r++)
                _mm_prefetch((const char *)(weight + R * (D + d) + r * 32), _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
            __m256 numbers[8];
            for (int r = 0; r < R; r++) {
                __m256i chunk = _mm256_loadu_si256((const __m256i *)(weight + r * D + d));
                chunk = half ? _mm256_and_si256(chunk, odd) : _mm256_slli_epi32(chunk, 16);
                numbers[r] = _mm256_castsi256_ps(chunk);
            }
            for (int c = 0; c < C; c++) {
                __m256 value = _mm256_loadu_ps(x + c * D + d + 8 * half);
                for (int r = 0; r < R; r++)
                    sum[r * C + c] = _mm256_fmadd_ps(numbers[r], value, sum[r * C + c]);
            }
        }
    }
    for (int i = 0; i < R * C; i += 4) {
        float four[4];
        _mm_storeu_ps(four, add_lanes(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
        for (int j = i; j < i + 4 && j < R * C; j++)
            sums[j % C * MOST_PANEL + j / C] = four[j - i];
    }
}

/* A panel's rows times C rows of x, by tiles of as many rows of the weight as the registers hold sums of. */
static inline __attribute__((always_inline)) void strip(const bf16 *weight, const float *x, float *sums, long D,
                                                        long rows, int R, int C, int fetches)
{
    long r = 0;
    for (; r + R <= rows; r += R)
        tile(weight + r * D, x, sums + r, D, R, C, fetches);
    for (; r < rows; r++)
        tile(weight + r * D, x, sums + r, D, 1, C, fetches);
}

static void panel_sums(const bf16 *weight, const float *x, float *sums, long D, long rows, long T)
{
    long t = 0;
    for (; t + 4 <= T; t += 4)
        if (t)
            strip(weight, x + t * D, sums + t * MOST_PANEL, D, rows, 3, 4, 0);
        else
            strip(weight, x, sums, D, rows, 3, 4, 1);
    switch (T - t) {
    case 1: strip(weight, x + t * D, sums + t * MOST_PANEL, D, rows, 4, 1, t == 0); break;
    case 2: strip(weight, x + t * D, sums + t * MOST_PANEL, D, rows, 4, 2, t == 0); break;
    case 3: strip(weight, x + t * D, sums + t * MOST_PANEL, D, rows, 4, 3, t == 0); break;
    }
}

static void narrow_row(const float *sums, const bf16 *bias, bf16 *y, long rows)
{
    if (bias)
        for (long r = 0; r < rows; r++)
            y[r] = narrow(sums[r] + wide(bias[r]));
    else
        for (long r = 0; r < rows; r++)
            y[r] = narrow(sums[r]);
}

static long panel_rows(long D, long E, long threads)
{
    long rows = PANEL_BYTES / (D * (long)sizeof(bf16)), share = (E + threads - 1) / threads;
    rows = rows > share ? share : rows;
    rows = rows > MOST_PANEL ? MOST_PANEL : rows;
    return rows > 24 ? rows / 24 * 24 : 24; /* a multiple of all tiles */
}

int vector_product(const bf16 *x_TD, const bf16 *weight_ED, const bf16 *bias_E, bf16 *y_TE, long T, long D, long E)
{
    float *x = malloc(T * D * sizeof(float));
    if (!x)
        return 0;
    widen_rows(x_TD, x, T * D);
    long rows = panel_rows(D, E, omp_get_max_threads());
#pragma omp parallel for schedule(static) if (D * E > SERIAL_WEIGHT)
    for (long e = 0; e < E; e += rows) {
        float sums[MOST_ROWS * MOST_PANEL];
        long used = E - e < rows ? E - e : rows;
        for (long t = 0; t < T; t += MOST_ROWS) {
            long count = T - t < MOST_ROWS ? T - t : MOST_ROWS;
            panel_sums(weight_ED + e * D, x + t * D, sums, D, used, count);
            for (long row = 0; row < count; row++)
                narrow_row(sums + row * MOST_PANEL, bias_E ? bias_E + e : 0, y_TE + (t + row) * E + e, used);
        }
    }
    free(x);
    return 1;
}
#endif
