# shim.mk - the CUDA kernels and backend on the host shim: compiled by a C++ compiler, run without a GPU.
#
# Called by `make check-cuda`, which sets SRC (source tree), TOP (build tree, for the libraries), CUDA_DIR, CXX and
# DAEMON_LIBS. Everything is built in TOP/tests/cuda. NVIDIA's headers are all that is used of the toolkit.
SRC ?= .
TOP ?= .
OUT = $(TOP)/tests/cuda
KERNELS = $(patsubst $(SRC)/kernels/cuda/%.cu,%,$(wildcard $(SRC)/kernels/cuda/*.cu))
SHIM = hostshim fakecuda fakeblas fakenccl
TESTS = test_wrappers test_attn test_linear test_select test_sample test_backend
CLIBS = $(TOP)/.libs/libkernels.a $(TOP)/.libs/libskverror.a
FLAGS = -std=c++17 -march=native -ffp-contract=off -Wall -Wextra -Werror -Wno-unknown-pragmas -I$(SRC) \
	-isystem $(CUDA_DIR)/include -DSKV_NCCL '-DCUDA_HOST_SHIM="tests/cuda/hostshim.h"' -MMD
PLAIN = -O2
ASAN = -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer

# The quick one: few head sizes, everything once.
FAST = -O2 -DCU_FEW_HEAD_SIZES

plain_objects = $(KERNELS:%=$(OUT)/plain/%.o) $(SHIM:%=$(OUT)/plain/%.o)
fast_objects = $(KERNELS:%=$(OUT)/fast/%.o) $(SHIM:%=$(OUT)/fast/%.o)
asan_objects = $(KERNELS:%=$(OUT)/asan/%.o) $(SHIM:%=$(OUT)/asan/%.o)

all: $(TESTS:%=$(OUT)/plain/%) $(TESTS:%=$(OUT)/asan/%) $(OUT)/plain/skvd-shim
plain: $(TESTS:%=$(OUT)/plain/%)
fast: $(TESTS:%=$(OUT)/fast/%) $(OUT)/fast/skvd-shim

# The fake cuBLAS does a model's products: worth the vectoriser.
$(OUT)/plain/fakeblas.o: PLAIN = -O3 -fassociative-math -fno-signed-zeros -fno-trapping-math
$(OUT)/fast/fakeblas.o: FAST = -O3 -fassociative-math -fno-signed-zeros -fno-trapping-math

# The whole daemon with the shim in the GPU's place: only here, never installed.

define variant
$(OUT)/$(1)/%.o: $(SRC)/kernels/cuda/%.cu
	@mkdir -p $$(@D)
	$$(CXX) $$(FLAGS) $$($(2)) -x c++ -c -o $$@ $$<
$(OUT)/$(1)/%.o: $(SRC)/tests/cuda/%.cu
	@mkdir -p $$(@D)
	$$(CXX) $$(FLAGS) $$($(2)) -x c++ -c -o $$@ $$<
$(OUT)/$(1)/%.o: $(SRC)/tests/cuda/%.cpp
	@mkdir -p $$(@D)
	$$(CXX) $$(FLAGS) $$($(2)) -c -o $$@ $$<
$(OUT)/$(1)/skvd-shim: $$($(1)_objects) $(TOP)/.libs/libskvdaemon.a $(TOP)/.libs/libengine.a $(CLIBS)
	$$(CXX) -o $$@ $(TOP)/.libs/libskvdaemon.a $(TOP)/.libs/libengine.a $(TOP)/.libs/libtext.a $(TOP)/.libs/libskvproto.a \
		$$($(1)_objects) $(CLIBS) $(DAEMON_LIBS) -lpthread -lm
$(OUT)/$(1)/%: $(OUT)/$(1)/%.o $$($(1)_objects) $(CLIBS)
	$$(CXX) $$($(2)) -o $$@ $$< $$($(1)_objects) $(CLIBS) -lpthread -lm
endef
$(eval $(call variant,plain,PLAIN))
$(eval $(call variant,asan,ASAN))
$(eval $(call variant,fast,FAST))
.SECONDARY:
-include $(wildcard $(OUT)/plain/*.d $(OUT)/asan/*.d $(OUT)/fast/*.d)
.PHONY: all plain fast
