/* Products of a few bfloat16 rows with a weight as it is stored, on processors with AMX.
 *
 * A product of few rows costs what reading the weight costs. A tile holds 16 rows of 32 numbers of the weight, which
 * need no other order in memory for it; the rows of x, few as they are, get the order that the instruction reads.
 * Sums are float. T rows, D input size and E output size (multiples of 32), W = min(T, 16) columns of a tile.
 */
#include "products.h"

#if TILE_PRODUCTS
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18
#define DEPTH 32 /* numbers in a row of a tile */
#define SIDE 16  /* rows of a tile, and the most columns */
#define SERIAL_WEIGHT 65536

struct __attribute__((aligned(64))) tiles {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Ask the kernel for the tiles' registers, once per process. Returns whether there are any. */
int may_use_tiles(void)
{
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Pairs of x of all columns, one pair after the other: [T / W groups, D / 2, W, 2], rows beyond T are zero. */
static void pair_rows(const bf16 *x, bf16 *paired, long T, long W, long D)
{
    for (long first = 0; first < T; first += W)
        for (long pair = 0; pair < D / 2; pair++)
            for (long t = first; t < first + W; t++, paired += 2)
                if (t < T)
                    memcpy(paired, x + t * D + 2 * pair, 4);
                else
                    memset(paired, 0, 4);
}

/* 32 rows of the weight times one or two groups of columns; sums: [group, half, 16, W]. Tiles 0 to 3 are sums. */
static inline __attribute__((always_inline)) void strip(const bf16 *weight, const bf16 *paired, float *sums, long D,
                                                        long W, int groups, int fetches)
{
    const bf16 *second = paired + D * W;
    _tile_zero(0);
    _tile_zero(1);
    if (groups > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long d = 0; d < D; d += DEPTH) {
        if (fetches)
            for (long row = 2 * SIDE; row < 4 * SIDE; row++)
                _mm_prefetch((const char *)(weight + row * D + d), _MM_HINT_T0);
        _tile_loadd(4, weight + d, D * 2);
        _tile_loadd(5, weight + SIDE * D + d, D * 2);
        _tile_loadd(6, paired + d * W, W * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (groups > 1) {
            _tile_loadd(7, second + d * W, W * 4);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, W * 4);
    _tile_stored(1, sums + SIDE * W, W * 4);
    if (groups > 1) {
        _tile_stored(2, sums + 2 * SIDE * W, W * 4);
        _tile_stored(3, sums + 3 * SIDE * W, W * 4);
    }
}

/* Round sums with their bias, then put them in the order of y. */
static void narrow_sums(const float *sums, const bf16 *bias, bf16 *y, long rows, long W, long E)
{
    bf16 rounded[4 * SIDE * SIDE];
    for (long first = 0; first < rows; first += W, sums += 2 * SIDE * W, y += W * E) {
        for (long e = 0; e < 2 * SIDE; e++)
            for (long t = 0; t < W; t++)
                rounded[e * W + t] = narrow(sums[e * W + t] + (bias ? wide(bias[e]) : 0.0f));
        for (long t = 0; t < W && first + t < rows; t++)
            for (long e = 0; e < 2 * SIDE; e++)
                y[t * E + e] = rounded[e * W + t];
    }
}

int tile_product(const bf16 *x_TD, const bf16 *weight_ED, const bf16 *bias_E, bf16 *y_TE, long T, long D, long E)
{
    long W = T < SIDE ? T : SIDE, groups = (T + W - 1) / W;
    bf16 *paired = T == 1 ? (bf16 *)x_TD : malloc(groups * W * D * sizeof(bf16));
    if (!paired)
        return 0;
    if (T > 1)
        pair_rows(x_TD, paired, T, W, D);
#pragma omp parallel if (D * E > SERIAL_WEIGHT)
    {
        struct tiles before, ours = {.palette = 1}; /* oneDNN expects to find the tiles as it left them */
        float sums[4 * SIDE * SIDE] __attribute__((aligned(64)));
        for (int tile = 0; tile < 8; tile++) {
            ours.rows[tile] = SIDE;
            ours.row_bytes[tile] = tile == 4 || tile == 5 ? 2 * DEPTH : 4 * W;
        }
        _tile_storeconfig(&before);
        _tile_loadconfig(&ours);
#pragma omp for schedule(static)
        for (long e = 0; e < E; e += 2 * SIDE)
            for (long g = 0; g < groups; g += 2) {
                const bf16 *weight = weight_ED + e * D, *columns = paired + g * W * D;
                long left = T - g * W;
                if (groups - g > 1)
                    strip(weight, columns, sums, D, W, 2, g == 0);
                else
                    strip(weight, columns, sums, D, W, 1, g == 0);
                narrow_sums(sums, bias_E ? bias_E + e : 0, y_TE + g * W * E + e, left < 2 * W ? left : 2 * W, W, E);
            }
        if (before.palette)
            _tile_loadconfig(&before);
        else
            _tile_release();
    }
    if (T > 1)
        free(paired);
    return 1;
}
#endif
