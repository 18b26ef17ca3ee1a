/* A SPANK plugin for tests: accepts the --container-* options of Pyxis (names from its public README) and exports what was
 * asked for as PYXIS_STUB_<NAME> into the environment of the tasks. It runs nothing in a container. */
#include <ctype.h>
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>

SPANK_PLUGIN(pyxis_stub, 1)

struct known { const char *name; int has_value; char *value; };
static struct known options[] = {
    {"container-image", 1, NULL},         {"container-mounts", 1, NULL},        {"container-workdir", 1, NULL},
    {"container-name", 1, NULL},          {"container-save", 1, NULL},          {"container-env", 1, NULL},
    {"container-mount-home", 0, NULL},    {"no-container-mount-home", 0, NULL}, {"container-remap-root", 0, NULL},
    {"no-container-remap-root", 0, NULL}, {"container-entrypoint", 0, NULL},    {"no-container-entrypoint", 0, NULL},
    {"container-writable", 0, NULL},      {"container-readonly", 0, NULL},
};
#define COUNT ((int)(sizeof options / sizeof options[0]))

static int remember(int index, const char *value, int remote) {
    (void)remote;
    options[index].value = strdup(value && *value ? value : "1");
    return 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv) {
    (void)argc;
    (void)argv;
    for (int i = 0; i < COUNT; i++) {
        struct spank_option option;
        memset(&option, 0, sizeof option);
        option.name = (char *)options[i].name;
        option.arginfo = options[i].has_value ? "VALUE" : NULL;
        option.usage = "recorded, not run";
        option.has_arg = options[i].has_value;
        option.val = i;
        option.cb = remember;
        if (spank_option_register(spank, &option) != ESPANK_SUCCESS) return -1;
    }
    return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
    (void)argc;
    (void)argv;
    for (int i = 0; i < COUNT; i++) {
        if (!options[i].value) continue;
        char name[64] = "PYXIS_STUB_";
        size_t end = strlen(name);
        for (const char *c = options[i].name; *c && end < sizeof name - 1; c++)
            name[end++] = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
        name[end] = 0;
        spank_setenv(spank, name, options[i].value, 1);
    }
    return 0;
}
