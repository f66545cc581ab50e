BEGIN TRANSACTION;
CREATE TABLE batches (
    model TEXT NOT NULL, page TEXT NOT NULL, writer TEXT NOT NULL, batch INTEGER NOT NULL,
    PRIMARY KEY (model, page, writer)
) WITHOUT ROWID;
INSERT INTO "batches" VALUES('llama','acceptance.3.1800.2279136','oneoneoneoneoneoneoneone',1);
INSERT INTO "batches" VALUES('llama','acceptance.3.1800.2279136','twotwotwotwotwotwotwotwo',1);
INSERT INTO "batches" VALUES('llama','length.3.1800.2279136','oneoneoneoneoneoneoneone',1);
INSERT INTO "batches" VALUES('llama','length.3.1800.2279136','twotwotwotwotwotwotwotwo',1);
INSERT INTO "batches" VALUES('llama','steps.16.225.18233088','oneoneoneoneoneoneoneone',1);
INSERT INTO "batches" VALUES('llama','steps.16.225.18233088','twotwotwotwotwotwotwotwo',1);
CREATE TABLE cells (
    model TEXT NOT NULL, page TEXT NOT NULL, key TEXT NOT NULL, sums TEXT NOT NULL,
    PRIMARY KEY (model, page, key)
) WITHOUT ROWID;
INSERT INTO "cells" VALUES('llama','acceptance.3.1800.2279136','["eagle3:3","b","chat","","0","0","4","first","text",""]','1.0 0.9162907318741551 0.8395887053184748');
INSERT INTO "cells" VALUES('llama','acceptance.3.1800.2279136','["eagle3:3","b","chat","c0ffee","0","0","4","first","text",""]','2.0 1.8325814637483102 1.6791774106369497');
INSERT INTO "cells" VALUES('llama','acceptance.3.1800.2279136','["eagle3:3","b","code","","0","0","4","first","text",""]','2.0 1.8325814637483102 1.6791774106369497');
INSERT INTO "cells" VALUES('llama','length.3.1800.2279136','["chat","","0","0","4","first","text",""]','1.0 5.298317366548036 28.072166916664518');
INSERT INTO "cells" VALUES('llama','length.3.1800.2279136','["chat","c0ffee","0","0","4","first","text",""]','2.0 10.596634733096073 56.144333833329036');
INSERT INTO "cells" VALUES('llama','length.3.1800.2279136','["code","","0","0","4","first","text",""]','2.0 10.596634733096073 56.144333833329036');
INSERT INTO "cells" VALUES('llama','steps.16.225.18233088','["b"]','5.0 1.115717756571049 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5 2.5');
CREATE TABLE documents (
    name TEXT NOT NULL, version INTEGER NOT NULL, text TEXT NOT NULL, written_s REAL NOT NULL,
    PRIMARY KEY (name, version)
) WITHOUT ROWID;
INSERT INTO "documents" VALUES('llama/pin',1,'{"version":1,"rules":"name: thresholds\nrules:\n  - name: code\n    when: {temperature: <= 0.5, workload: [code]}\n    prefer: [eagle3, ngram]\n  - name: rest\n    weights: {eagle3: 1.5, baseline: 2.25}\n","before":[]}',4102444792.0);
INSERT INTO "documents" VALUES('llama/pin',2,'{"version":2,"rules":"name: thresholds\nrules:\n  - name: code\n    when: {temperature: <= 0.5, workload: [code]}\n    prefer: [eagle3, ngram]\n  - name: rest\n    weights: {eagle3: 1.5, baseline: 2.25}\n","before":[null,1]}',4102444793.0);
INSERT INTO "documents" VALUES('llama/rules',1,'name: thresholds
rules:
  - name: code
    when: {temperature: <= 0.5, workload: [code]}
    prefer: [ngram]
  - name: rest
    weights: {eagle3: 1.5, baseline: 2.25}
',4102444791.0);
INSERT INTO "documents" VALUES('llama/rules',2,'name: thresholds
rules:
  - name: code
    when: {temperature: <= 0.5, workload: [code]}
    prefer: [eagle3, ngram]
  - name: rest
    weights: {eagle3: 1.5, baseline: 2.25}
',4102444792.0);
CREATE TABLE pages (
    model TEXT NOT NULL, page TEXT NOT NULL, generation TEXT NOT NULL, version INTEGER NOT NULL, end_s REAL NOT NULL,
    PRIMARY KEY (model, page)
) WITHOUT ROWID;
INSERT INTO "pages" VALUES('llama','acceptance.3.1800.2279136','19b8578f883c44cc8a279738d58de9a2',2,4102489800.0);
INSERT INTO "pages" VALUES('llama','length.3.1800.2279136','91c1f788e6324e15a166d8c77028991b',2,4102489800.0);
INSERT INTO "pages" VALUES('llama','steps.16.225.18233088','fad88ecc013b458d8805874c69a97f1d',2,4102450425.0);
PRAGMA application_id = 1397770071;
PRAGMA user_version = 1;
COMMIT;
